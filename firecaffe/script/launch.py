"""A function on N workers of this host, from a script or a notebook, without torchrun.

The workers are new processes and not forks: a fork would copy state of this process (OpenMP's
threads, CUDA, a notebook's loop), and hang or fail. A function of `__main__` is sent by value with
everything it uses there; modules are imported.
"""

import inspect
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar, cast

import torch

from firecaffe.cluster.from_script import bind, from_script
from firecaffe.cluster.hosts import Hosts, check_memory
from firecaffe.cluster.launcher import RankFailedError
from firecaffe.cluster.launcher import launch as launch_ranks
from firecaffe.cluster.world import is_launched
from firecaffe.errors import FirecaffeError, RecipeError, RunError
from firecaffe.files import private_folder
from firecaffe.output import kept_stdout, say
from firecaffe.runs.fault import settle_fault
from firecaffe.user_code import packed, shown

CALLER, CALL, RETURNED = "caller", "call", "returned"
"""A pickled `Caller`; the function with its arguments; what it returned on rank 0."""


class Caller(NamedTuple):
    function: str
    path: list[str]
    argv: list[str]
    dtype: torch.dtype
    """The default type of new tensors."""


Value = TypeVar("Value")


@from_script
def launch(
    function: Callable[..., Value],
    nproc_per_node: int,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    max_restarts: int = 0,
) -> Value:
    """Run `function(*args, **kwargs)` on workers of this host; return what rank 0 returns.

    In the function, `firecaffe.train`, `firecaffe.parallelize` and `torch.distributed` find the
    world as they do under torchrun. No `if __name__ == "__main__"` is needed around the call.

    Args:
        function: A function of a module, a script or a notebook, which each worker calls.
        nproc_per_node: The number of workers, each a process.
        args: The function's arguments by position, which are copied to the workers.
        kwargs: The function's arguments by name.
        max_restarts: How often all workers are restarted if one is lost; `firecaffe.train` then
            continues from its newest checkpoint.

    Raises: RecipeError if the function does not accept the arguments, or if it, they or its result
    cannot be sent; RankFailedError, one line with the rank and its exit code, for the worker that
    failed first, with the traceback of the function as its note; PreemptedError if the training was
    asked to stop and has saved. A script that does not catch it ends with that line and exit code.
    """
    _check(function, nproc_per_node, args, kwargs, max_restarts)
    value = launch_on(Hosts(nproc_per_node), function, args, kwargs, max_restarts)
    return cast(Value, value)


def launch_on(
    hosts: Hosts,
    function: Callable[..., Value],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    max_restarts: int = 0,
) -> Value | None:
    """Run a function like `launch`, on workers of several hosts; None on hosts without rank 0."""
    name = _name(function)
    with private_folder("firecaffe-launch-") as folder:
        caller = Caller(name, sys.path, sys.argv, torch.get_default_dtype())
        try:
            call = packed((function, tuple(args), dict(kwargs or {})))
        except Exception as error:  # whatever an object's own pickling raises
            raise RecipeError(
                f"{name} and its arguments cannot be copied to the workers: {error}; what cannot "
                "be copied, as a lock or an open file, has to be made by a worker"
            ) from error
        try:
            (folder / CALLER).write_bytes(pickle.dumps(caller))
            (folder / CALL).write_bytes(call)
        except OSError as error:
            raise RunError(
                f"{folder.parent}: no room for {name} and its arguments, {len(call):,} bytes "
                f"({error.strerror}); another folder for temporary files is set by TMPDIR"
            ) from error
        kept_stdout().flush()
        try:
            folders = launch_ranks(
                [str(folder)],
                hosts,
                max_restarts,
                settle=settle_fault,
                module="firecaffe.script.launched_worker",
            )
        except RankFailedError as error:
            if error.traceback:
                error.add_note(error.traceback)
            raise
        for run in folders:
            say(f"run folder: {run}")
        if not (folder / RETURNED).is_file():
            if not hosts.is_one:
                return None
            line = f"rank 0: {name} ended its process, with code 0, before it returned"
            raise RankFailedError(line, FirecaffeError.exit_code)
        value: Value = pickle.loads((folder / RETURNED).read_bytes())
        return value


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _check(function: Any, nproc_per_node: int, args: Any, kwargs: Any, max_restarts: int) -> None:
    if not callable(function):
        raise RecipeError(
            f"launch: function is {shown(function)}; expected a function, which the workers call: "
            "launch(train, 4), not launch(train(), 4)"
        )
    name = _name(function)
    if not isinstance(args, Sequence) or isinstance(args, str | bytes):
        raise RecipeError(
            f"launch: args is {shown(args)}; expected the arguments in a tuple, as args=(1, 2), or "
            "args=(1,) for one"
        )
    is_named = isinstance(kwargs, Mapping) and all(isinstance(name, str) for name in kwargs)
    if kwargs is not None and not is_named:
        raise RecipeError(
            f"launch: kwargs is {shown(kwargs)}; expected the arguments by name, as "
            "kwargs={'steps': 10}"
        )
    for word, number, least in (
        ("nproc_per_node", nproc_per_node, 1),
        ("max_restarts", max_restarts, 0),
    ):
        if type(number) is not int or number < least:
            raise RecipeError(
                f"launch: {word} is {shown(number)}; it must be at least {least}, a whole number"
            )
    check_memory(nproc_per_node, "launch: nproc_per_node")
    if is_launched():
        raise RecipeError(
            "launch starts workers, and this process is one already, of a launcher (torchrun, "
            "mpirun, srun, launch); call the function itself"
        )
    with suppress(ValueError):  # a builtin without a signature
        bind(f"launch: {name}", inspect.signature(function), args, kwargs or {})
