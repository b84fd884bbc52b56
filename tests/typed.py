"""Commands of Python as processes of their own that need not load torch first: 0.1 s, not 3.

Such a process is a child of the fork server that the ranks of tests come from (`tests.world`): with
a number, an environment, signals and an exit code of its own. The Pythons that it starts in its
turn, such as a launcher's ranks or a search's trainings, are forks of it, with torch loaded
likewise; every other program is started as ever, and so is a Python with -I. A test of the start
itself types `sys.executable`.
"""

import atexit
import ctypes
import gc
import io
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from itertools import pairwise
from multiprocessing import resource_tracker
from multiprocessing.reduction import DupFd
from pathlib import Path
from types import ModuleType
from typing import IO, Any, NoReturn, Self

import psutil
import torch

from firecaffe.cli import main
from tests.world import fork_server

WHOLE_END = "TESTS_WHOLE_END"
"""Set in the environment: these processes take down the interpreter and its libraries at their end,
a second each, and do not leave that to the system. For tests of just that.
"""

TIMEOUT_S = 900.0
"""For any command: only one that hangs takes so long."""


def firecaffe(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """`firecaffe WORDS…`; options: as for `python`."""
    return python("-m", "firecaffe", *words, **options)


def in_process(*words: object) -> subprocess.CompletedProcess[str]:
    """`firecaffe WORDS…` in this process: for commands that start none, and leave nothing in it."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main([str(word) for word in words])
    return subprocess.CompletedProcess(
        [str(word) for word in words], code, out.getvalue(), err.getvalue()
    )


def said_by(*words: object) -> str:
    """What a command says in this process, which ends well."""
    done = in_process(*words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refused(code: int, *words: object) -> str:
    """What is on stderr where a command in this process ends with that exit code."""
    done = in_process(*words)
    assert done.returncode == code, done.stderr
    return done.stderr


def torchrun(ranks: int, *words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """`torchrun --standalone --nproc-per-node RANKS WORDS…`; options: as for `python`."""
    run = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks)
    return python(*run, *words, **options)


def python(
    *words: object, environment: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """`python WORDS…` to its end: -m MODULE, -c CODE or a script, and its words.

    environment: beside this process's. Raises: subprocess.TimeoutExpired.
    """
    with Typed(*words, environment=environment, cwd=cwd) as process:
        said, errors = process.communicate()
        code = process.wait()
    return subprocess.CompletedProcess([str(word) for word in words], code, said, errors)


class Typed:
    """A Python on its way. stdout is read while it goes on; left early, it goes with all of its."""

    def __init__(
        self,
        *words: object,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self.words = [str(word) for word in words]
        reader, writer = os.pipe()
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = fork_server().Process(
            target=_become,
            args=(
                self.words,
                {**os.environ, **(environment or {})},
                str(cwd or Path.cwd()),
                DupFd(writer),
                DupFd(self._errors.fileno()),
            ),
        )
        self._process.start()
        os.close(writer)
        self.stdout: IO[str] = os.fdopen(reader, encoding="utf-8")
        assert self._process.pid is not None
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.is_alive():
            for each in [*psutil.Process(self.pid).children(recursive=True), self._process]:
                each.kill()
            self._process.join()
        self.stdout.close()
        self._errors.close()

    def communicate(self) -> tuple[str, str]:
        """What is left of stdout, if it was not closed, and all of stderr."""
        watch = threading.Timer(TIMEOUT_S, self._process.kill)
        watch.start()
        said = "" if self.stdout.closed else self.stdout.read()
        watch.cancel()
        self.wait()
        self._errors.seek(0)
        return said, self._errors.read()

    def wait(self) -> int:
        """The exit code. Raises: subprocess.TimeoutExpired."""
        self._process.join(TIMEOUT_S)
        code: int | None = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired(self.words, TIMEOUT_S)
        return code


def _become(
    words: list[str], environment: dict[str, str], cwd: str, stdout: Any, stderr: Any
) -> NoReturn:
    """In the new process."""
    _forget_ends()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    null = os.open(os.devnull, os.O_RDONLY)
    for place, source in enumerate((null, stdout.detach(), stderr.detach())):
        os.dup2(source, place)
        os.close(source)
    _run(words)


def _run(words: Sequence[str]) -> NoReturn:
    """What the interpreter does with its words, and its end."""
    subprocess.Popen._execute_child = _fork_pythons  # type: ignore[attr-defined]
    # As in a new program: the default of a fork server's child gives locks names, which stay.
    multiprocessing.set_start_method(None, force=True)
    # A fork of a process in which OpenMP has begun threads waits for them for ever.
    torch.set_num_threads(1)
    sys.stdout = open(1, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115
    try:
        _interpret(words)
        code: Any = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        code = 1
        try:
            sys.excepthook(*sys.exc_info())
        except SystemExit as end:  # a hook may have a code of its own
            code = end.code
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    if os.environ.get(WHOLE_END):
        ctypes.pythonapi.Py_Exit(code or 0)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def _interpret(words: Sequence[str]) -> None:
    if words[0] == "-m":
        sys.argv = list(words[1:])
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(words[1], "<string>", "exec"), vars(main))
    else:
        sys.argv = list(words)
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")


IN_NAMESPACE = ("setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec")
"""How `cluster_run` begins a command on an emulated host; its namespace comes next."""

_execute_child = subprocess.Popen._execute_child  # type: ignore[attr-defined]


def _fork_pythons(self: Any, args: Any, executable: Any, *others: Any) -> None:
    """In place of subprocess's: a Python is forked; others: as there, by place."""
    command = [os.fspath(each) for each in args] if isinstance(args, list | tuple) else [args]
    namespace = None
    if tuple(command[: len(IN_NAMESPACE)]) == IN_NAMESPACE:
        namespace, *command = command[len(IN_NAMESPACE) :]
    # -I: a rank's pulse, which loads so little that a fork takes longer.
    if command[0] != sys.executable or command[1:2] == ["-I"]:
        _execute_child(self, args, executable, *others)
        return
    preexec, close_fds, pass_fds, cwd, environment = others[:5]
    stdin, _, _, stdout, _, stderr = others[8:14]
    start_new_session = others[19]
    self.pid = os.fork()
    if self.pid == 0:
        try:
            if namespace is not None:
                _enter(namespace)
            _be_forked(command[1:], environment, cwd, (stdin, stdout, stderr), close_fds, pass_fds,
                       preexec, start_new_session)  # fmt: skip
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    self._child_created = True
    self._close_pipe_fds(*others[8:14])


def _forget_ends() -> None:
    """What this process's parent has to do at its end is the parent's: taking down torch's tables
    takes as long as the fork.
    """
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]


def _enter(namespace: str) -> None:
    """What setpriv and ip do: this process ends with its parent, and sees that network alone."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}", "rb") as file:
        if libc.prctl(1, signal.SIGKILL) or libc.setns(file.fileno(), 0x40000000):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), namespace)


def _be_forked(
    words: list[str],
    environment: Mapping[str, str] | None,
    cwd: str | None,
    standard: tuple[int, int, int],
    close_fds: bool,
    pass_fds: Sequence[int],
    preexec: Any,
    start_new_session: bool,
) -> NoReturn:
    # What the parent has to clear away, now or at its end, is the parent's.
    gc.freeze()
    _forget_ends()
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # which a new program would inherit
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(
            number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        )
    for place, source in enumerate(standard):
        if source not in (-1, place):
            os.dup2(source, place)
    if close_fds:
        kept = [2, *sorted(pass_fds), os.sysconf("SC_OPEN_MAX")]
        for first, last in pairwise(kept):
            os.closerange(first + 1, last)
        # Of the parent's tracker, which would be asked whether it is there: a line of text into
        # whatever file has that number by then.
        vars(resource_tracker)["_resource_tracker"]._fd = None
    if environment is not None:
        os.environ.clear()
        os.environ.update({os.fsdecode(k): os.fsdecode(v) for k, v in environment.items()})
    if cwd is not None:
        os.chdir(cwd)
    if start_new_session:
        os.setsid()
    if preexec is not None:
        preexec()
    _run([word for word in words if word not in ("-u", "-P")])
