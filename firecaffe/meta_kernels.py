"""torch without its compiler, for whoever computes shapes, or trains without it.

Kernels for the meta device and optimizers are marked as not to be traced, by a decorator that
imports `torch._dynamo` at the first call: a second of each rank, and of every command that asks a
network for its shapes, and nothing is traced here.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, TypeVar

NAME = "torch._dynamo"
REMEMBERED = "__dynamo_disable"
"""Name under which torch keeps the compiler's answer, with the function."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


@contextmanager
def without_compiler() -> Iterator[None]:
    """A stand-in for the compiler; if it is loaded already, or the stand-in lacks what is asked
    for, the compiler itself.

    For one thread: another one that begins to compile meanwhile may meet the stand-in.
    """
    if NAME in sys.modules:
        yield
        return
    stand_in = _StandIn(NAME)
    sys.modules[NAME] = stand_in
    try:
        yield
    finally:
        stand_in.leave()


class _StandIn(ModuleType):
    """The two functions that torch asks the compiler for outside of a trace."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._answered: list[Callable[..., Any]] = []

    def disable(self, function: _Function, recursive: bool = True, **_: bool) -> _Function:
        self._answered.append(function)
        return function

    def graph_break(self, *_: Any, **__: Any) -> None:
        """Between two graphs; there is none."""

    def leave(self) -> None:
        """Makes room for the compiler. Those that remember an answer will ask again."""
        if sys.modules.get(NAME) is self:
            del sys.modules[NAME]
        for function in self._answered:
            vars(function).pop(REMEMBERED, None)

    def __getattr__(self, name: str) -> Any:
        self.leave()
        return getattr(importlib.import_module(NAME), name)
