"""The command line: one thin file per command, found in COMMANDS."""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from importlib import import_module

from firecaffe.comm.world import LAUNCHED
from firecaffe.errors import FirecaffeError, RecipeError, RunError

COMMANDS = {
    "train": "train a network on N workers",
    "verify": "show that the number of workers does not change a bit",
    "compare": "compare finished runs",
    "profile": "a network's parameters, activations and FLOPs, layer by layer",
    "schedule": "the rounds and transfers of an exchange",
    "bench": "measure exchanges beside the backend's own, and the link",
    "data": "obtain a data set",
    "demo": "train on one and on several workers, and compare",
}

INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns its exit code. docs/usage.md lists the codes."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(_overview())
        return 0 if argv else RecipeError.exit_code
    try:
        if argv[0] not in COMMANDS:
            raise RecipeError(f"no command {argv[0]!r}; the commands are {', '.join(COMMANDS)}")
        command: Callable[[list[str]], int] = import_module(f"firecaffe.cli.{argv[0]}").main
        return command(argv[1:])
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    except FirecaffeError as error:
        return _fail(str(error), error.exit_code)
    except OSError as error:  # a full disk, a folder without permission
        if isinstance(error, BrokenPipeError) and "RANK" not in os.environ:
            # Whoever read our output has seen enough. A rank's broken pipe may be a lost peer.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return RunError.exit_code
        place = f"{error.filename}: " if error.filename else ""
        return _fail(f"{place}{error.strerror or error}", RunError.exit_code)
    except Exception as error:
        traceback.print_exc()
        return _fail(f"{type(error).__name__}: {error}", FirecaffeError.exit_code)


def _fail(message: str, exit_code: int) -> int:
    """One line for the user. A rank leaves it to its launcher, which says it once for all ranks."""
    line = " ".join(message.split())
    report = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if report:
        extra = {"timestamp": str(int(time.time())), "time_s": time.time()}
        with open(report, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": line, "extraInfo": extra}}, file)
    if not report or LAUNCHED not in os.environ:
        rank = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
        print(f"firecaffe: {rank}{line}", file=sys.stderr)
    if report:
        # A communication thread may still wait for a rank that is gone; do not wait for it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
    return exit_code


def _overview() -> str:
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:{width}}  {what}" for name, what in COMMANDS.items())
    return f"usage: firecaffe COMMAND …\n\n{rows}\n\n`firecaffe COMMAND --help` says more."
