"""Detects code of networks and data that asks for the number of ranks, which may decide its bits.

Code that asks only for its own rank need not be detected: ranks compare what they compute.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from types import FrameType
from typing import Any

from firecaffe.errors import RecipeError
from firecaffe.value_checks import some_of

VARIABLES = ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
SIZE = "get_world_size"

HARMLESS = ("is_", "get_rank", "get_node_local_rank", "get_backend", "WORLD", "<")
"""Prefixes of functions in torch.distributed whose answers do not depend on the number of ranks."""

LOOKS = ("os", "collections.abc")
"""Modules through which a read of the environment passes."""

LIBRARIES = frozenset((*sys.stdlib_module_names, "torch", "firecaffe"))
"""Packages whose calls do not count: they load modules, or ask for their own purposes."""

C10D, SIZE_OF = "torch.distributed.distributed_c10d", "_get_group_size"
"""Torch's function that `get_world_size` asks, and its module."""


@contextmanager
def world_queries() -> Iterator[list[str]]:
    """Yield a list that names how the block's code asks for ranks or exchanges data.

    Code of torch and of Python's library does not count, nor do other threads. If a profiler is
    active, exchanges are not seen: Python allows only one profiler.
    """
    asked: list[str] = []
    if sys.getprofile() is not None:
        with size_queries() as asked:
            yield asked
        return

    def watch(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and (name := _query_name(frame)) and name not in asked:
            asked.append(name)

    sys.setprofile(watch)
    try:
        yield asked
    finally:
        sys.setprofile(None)


@contextmanager
def size_queries() -> Iterator[list[str]]:
    """Yield a list that names how the block's code asks for the number of ranks.

    Unlike `world_queries` it sees no exchange, and costs time only when code asks: opening data may
    take millions of calls. Other threads do not count.
    """
    asked: list[str] = []
    thread, environment, c10d = get_ident(), type(os.environ), sys.modules.get(C10D)

    class WatchedEnvironment(environment):  # type: ignore[misc, valid-type]
        def __getitem__(self, key: str) -> str:
            is_asked = key in VARIABLES and key not in asked and get_ident() == thread
            if is_asked and not _is_of_library(sys._getframe(), LOOKS):
                asked.append(key)
            return str(super().__getitem__(key))

    size_of = getattr(c10d, SIZE_OF, None)

    def watched_size(*given: Any) -> Any:
        caller = sys._getframe(1)
        is_asked = caller.f_code.co_name == SIZE and get_ident() == thread
        if is_asked and SIZE not in asked and not _is_of_library(caller):
            asked.append(SIZE)
        return size_of(*given)  # type: ignore[misc]

    os.environ.__class__ = WatchedEnvironment
    if size_of is not None:
        setattr(c10d, SIZE_OF, watched_size)
    try:
        yield asked
    finally:
        os.environ.__class__ = environment
        if size_of is not None:
            setattr(c10d, SIZE_OF, size_of)


def _query_name(frame: FrameType) -> str:
    module, function = str(frame.f_globals.get("__name__")), frame.f_code.co_name
    if module == "os" and function == "__getitem__":
        key = frame.f_locals.get("key")
        is_asked = key in VARIABLES and frame.f_locals.get("self") is os.environ
        return str(key) if is_asked and not _is_of_library(frame, LOOKS) else ""
    if not module.startswith("torch.distributed") or module.endswith("c10d_logger"):
        return ""
    if function.startswith(HARMLESS) or _is_of_library(frame):
        return ""
    return function if function == SIZE else f"{function} of torch.distributed in {_caller(frame)}"


def _caller(frame: FrameType) -> str:
    """Return the module that calls a function of torch.distributed, which its log wraps."""
    module, before = "", frame.f_back
    while before is not None and (not module or module.endswith("c10d_logger")):
        module, before = str(before.f_globals.get("__name__")), before.f_back
    return module


def _is_of_library(frame: FrameType, through: Sequence[str] = ()) -> bool:
    """Whether a library calls a frame; callers in the modules `through` are skipped.

    Who takes all variables there asks for none of them, and counts as a library.
    """
    caller = frame.f_back
    while caller is not None:
        module = str(caller.f_globals.get("__name__"))
        if module in through and caller.f_code.co_name in ("__iter__", "copy", "__or__"):
            return True
        if module not in through and not module.endswith("c10d_logger"):
            return module.partition(".")[0] in LIBRARIES
        caller = caller.f_back
    return False


def check_queries(asked: Sequence[str]) -> None:
    """Raise RecipeError if forward exchanges something with other ranks."""
    sent = [name for name in asked if name not in (*VARIABLES, SIZE)]
    if sent:
        raise RecipeError(
            f"forward or the loss calls {sent[0]}, so that the ranks decide what it computes, and "
            "wait for each other where they have unequally many micro-batches; expected a function "
            "of its micro-batch"
        )


def doubts_of_world(who: str, asked: Sequence[str]) -> list[str]:
    if not asked:
        return []
    return [
        f"{who} asks for the number of ranks ({some_of(asked)}): another number gets other bits if "
        "what it computes depends on that"
    ]
