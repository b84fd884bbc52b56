"""Shapes on the meta device, without what torch would load for them: its compiler, and sympy.

Torch marks kernels for the meta device and optimizers as not to be traced, with a decorator that
imports `torch._dynamo` at the first call. Nothing is traced here, but the import would cost each
rank, and each command that asks a network for its shapes, a second.
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
"""Attribute of a function in which torch keeps the compiler's answer about it."""

FILLS = frozenset(
    (
        *(nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_),
        *(Tensor.normal_, Tensor.uniform_),
    )
)
"""Functions that fill a tensor at random; on the meta device, with kernels written in Python."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


@contextmanager
def without_compiler() -> Iterator[None]:
    """Replace the compiler with a stand-in in the block, unless it is loaded already.

    The stand-in loads the compiler if it lacks what is asked for. The block is for one thread:
    another one that begins to compile meanwhile may get the stand-in.
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
    """Make networks on the meta device in the block, and do not fill their tensors, which have no
    memory: torch's kernels for it would load sympy, which takes a third of a second.
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
        """Do nothing: there is no graph to break."""

    def leave(self) -> None:
        """Remove the stand-in. Functions that keep one of its answers will ask the compiler."""
        if sys.modules.get(NAME) is self:
            del sys.modules[NAME]
        for function in self._answered:
            vars(function).pop(REMEMBERED, None)

    def __getattr__(self, name: str) -> Any:
        if name == "__file__":  # `inspect.getmodule` asks all modules, even during imports
            raise AttributeError(name)
        self.leave()
        return getattr(importlib.import_module(NAME), name)
