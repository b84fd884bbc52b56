"""A warning, at a network's first forward, about state that ranks do not exchange."""

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from firecaffe.inventory.forward_watch import ForwardWatch
from firecaffe.inventory.network_state import kinds_of
from firecaffe.value_checks import some_of


def tell_of_own_state(module: nn.Module, call: str, averages: bool) -> None:
    """Warn, on the first rank, about state that the function `call` does not exchange.

    `averages`: it averages trained parameters, so that forward may change these.
    """
    if dist.is_initialized() and (dist.get_rank() or dist.get_world_size() == 1):
        return
    if extra := kinds_of(module).extra:
        _warn(call, f"the extra state of {some_of(extra)}")
    _FirstForward(module, call, averages)


class _FirstForward:
    def __init__(self, module: nn.Module, call: str, averages: bool) -> None:
        self._call, self._averages = call, averages
        self._watch: ForwardWatch | None = None
        self._hooks = (
            module.register_forward_pre_hook(self._before),
            module.register_forward_hook(self._after),
        )

    def _before(self, module: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():
            return  # otherwise the check would be compiled, too
        if module.training and self._watch is None:
            self._watch = ForwardWatch(module)

    def _after(self, *_: Any) -> None:
        if torch.compiler.is_compiling() or self._watch is None:
            return
        for hook in self._hooks:
            hook.remove()
        changed = self._watch.changed()
        if self._averages:
            changed = [name for name in changed if not self._watch.is_trained(name)]
        if changed:
            _warn(self._call, f"what forward changes of {some_of(changed)}")


def _warn(call: str, what: str) -> None:
    warnings.warn(
        f"{call} does not exchange {what}: each rank has its own; keep it in a buffer, or exchange "
        "it in the script",
        stacklevel=4,
    )
