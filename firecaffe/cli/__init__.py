"""The command line: thin files of commands, found by COMMANDS and SHARED."""

import os
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from typing import Any

import firecaffe
from firecaffe.api.answer import replace_unencodable
from firecaffe.cluster.handover import end_process, leave_report, report
from firecaffe.errors import (
    FirecaffeError,
    OutputLostError,
    RecipeError,
    RunError,
    memory_full,
    own_traceback,
)
from firecaffe.faults import Fault
from firecaffe.output import outputs_kept
from firecaffe.resume_advice import command_wording

COMMANDS = {
    "plan": "forecast a training on a cluster: time, memory, cost, and what to change",
    "import": "a solver or a net of Caffe's as a recipe",
    "train": "train a network on N workers",
    "evaluate": "a run's network on its test data, or on other data",
    "predict": "what a run's network says of images",
    "export": "a run's network as a file for other programs",
    "unpack": "the weights of a .fcz file as safetensors",
    "verify": "show that the number of workers does not change a bit",
    "replay": "compute an asynchronous run again, to the same bits, from its log of events",
    "tune": "find the learning rate that keeps the accuracy at another batch size",
    "compress": "make a trained network small: prune, share values, code; one file",
    "compare": "compare finished runs",
    "check": "look a cluster over, and write the cluster file that plan reads",
    "explain": "where the time of each rank of a run went, and which rank is slow",
    "profile": "a network's parameters, activations and FLOPs, layer by layer",
    "schedule": "the rounds and transfers of an exchange",
    "bench": "measure exchanges beside the backend's own, and the link",
    "data": "obtain a data set",
    "pack": "pack images into shards that are read fast, in any order",
    "demo": "train on one and on several workers, and compare",
}

SHARED = {
    **dict.fromkeys(("evaluate", "predict", "export", "unpack"), "trained_network"),
    **dict.fromkeys(("import", "data", "pack"), "import_and_pack"),
    **dict.fromkeys(("verify", "replay", "demo"), "same_bits"),
    **dict.fromkeys(("bench_exchange", "bench_step", "bench_data"), "bench"),
}
"""The file of each command that shares one; other commands have a file of their name."""

RUN_TO_END = {
    *("train", "replay", "verify", "tune", "compress", "demo"),
    *("bench", "check", "data", "pack", "predict", "export"),
}
"""Commands that do more than print: they run to their end even if nobody reads their output."""

INTERRUPTED = 130


WITHOUT_TORCH = {"schedule", "compare", "explain"}

Loaded = Callable[[], object]


def main(argv: list[str] | None = None, loaded: Loaded = lambda: None) -> int:
    """Run one command and return its exit code. docs/reference/errors.md lists the codes.

    loaded: called when the command's module is loaded, and torch, if the command needs it.
    """
    argv = sys.argv[1:] if argv is None else argv
    replace_unencodable()
    goes_on = "RANK" in os.environ or not RUN_TO_END.isdisjoint(argv[:1])
    with outputs_kept(goes_on), command_wording(argv[0] if argv else HELP[0]):
        return _ended(argv, loaded)


def _ended(argv: list[str], loaded: Loaded) -> int:
    try:
        exit_code = _run(argv, loaded)
        sys.stdout.flush()
        return exit_code
    except KeyboardInterrupt:
        exit_code = _fail("interrupted", INTERRUPTED)
        if "RANK" in os.environ:
            end_process(exit_code)  # groups that are freed here wait for other ranks
        return exit_code
    except OutputLostError as error:
        return error.exit_code if error.has_left else _fail(str(error), error.exit_code)
    # No command raises SystemExit, but user code may, and its code 0 would look like a success.
    except (Exception, SystemExit) as error:
        full = memory_full(error) if getattr(error, "fault", None) is None else None
        return _told(full or error)


def _told(error: BaseException) -> int:
    if isinstance(error, FirecaffeError):
        return report(error)
    if isinstance(error, OSError) and getattr(error, "fault", None) is None:
        # A full disk, a folder without permission.
        place = f"{error.filename}: " if error.filename else ""
        return _fail(f"{place}{error.strerror or error}", RunError.exit_code)
    return _fail_with_traceback(error)


HELP = ("-h", "--help")


def _is_section(name: str) -> bool:
    from firecaffe.cli.help import SECTIONS

    return name in SECTIONS


def _run(argv: list[str], loaded: Loaded) -> int:
    """Run a command. Help and the version load no code that trains."""
    if not argv or argv[0] in HELP or argv == ["help"]:
        print(_overview())
        return 0 if argv else RecipeError.exit_code
    if argv == ["--version"]:
        print(f"firecaffe {firecaffe.__version__}")
        return 0
    is_asked = argv[0] == "help"
    words = argv[1:] if is_asked else argv
    if words[0] not in COMMANDS and not (is_asked and _is_section(words[0])):
        from firecaffe.value_checks import did_you_mean

        close = did_you_mean(words[0], COMMANDS)
        raise RecipeError(f"no command {words[0]!r}{close}; the commands are {', '.join(COMMANDS)}")
    if is_asked or set(words) & set(HELP):
        from firecaffe.cli.help import help_text

        print(help_text([word for word in words if word not in HELP], is_asked))
        return 0
    if not _has_folder():  # without one, MKL would end the process
        raise RunError("the current folder has been deleted; change to one that is there")
    command = function_of("main", words[0])
    if words[0] not in WITHOUT_TORCH:
        import_module("torch")  # most of a command's loading time, so it comes before `loaded`
    loaded()
    command(words[1:])
    return 0


def _has_folder() -> bool:
    try:
        return bool(os.getcwd())
    except FileNotFoundError:
        return False


def function_of(name: str, command: str) -> Callable[..., Any]:
    """Load a command's `main` or `make_parser`; in a shared file, their names end in _COMMAND."""
    module = import_module(f"firecaffe.cli.{SHARED.get(command, command)}")
    function: Callable[..., Any] = getattr(
        module, f"{name}_{command}" if command in SHARED else name
    )
    return function


def _fail(message: str, exit_code: int, fault: Fault | None = None, own_traceback: str = "") -> int:
    """Report one line to the user; a rank's launcher prints it, once for all ranks."""
    leave_report(message, fault, own_traceback)
    return exit_code


def _fail_with_traceback(error: BaseException) -> int:
    """Report an unexpected error; of user code the line, then the traceback after firecaffe."""
    own = own_traceback(error)
    if not own:
        traceback.print_exc()
    fault: Fault | None = getattr(error, "fault", None)
    line = f"{type(error).__name__}: {error}" if fault is None else fault.line
    return _fail(line, FirecaffeError.exit_code, fault, own)


def _overview() -> str:
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:{width}}  {what}" for name, what in COMMANDS.items())
    return f"usage: firecaffe COMMAND …\n\n{rows}\n\n`firecaffe help COMMAND` says more."
