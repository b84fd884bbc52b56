"""Shapes on the meta device, without what torch would load for them: its compiler, and sympy.

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

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

NAME = "torch._dynamo"
REMEMBERED = "__dynamo_disable"
"""Name under which torch keeps the compiler's answer, with the function."""

FILLS = frozenset(
    (
        *(nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_),
        *(Tensor.normal_, Tensor.uniform_),
    )
)
"""Functions that fill a tensor with random numbers by a kernel of Python's on the meta device."""

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


@contextmanager
def on_meta() -> Iterator[None]:
    """Makes networks on the meta device, where they take no memory, and fills none of their
    tensors: they have no numbers, and torch's kernel for it loads sympy, a third of a second.
    """
    with torch.device("meta"), _NoFills():
        yield


class _NoFills(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in FILLS:
            tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


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
        if name == "__file__":  # `inspect.getmodule` asks all modules, in the midst of imports
            raise AttributeError(name)
        self.leave()
        return getattr(importlib.import_module(NAME), name)
