"""Observes what one forward of a network changes and which generators it draws from."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from firecaffe.errors import RecipeError
from firecaffe.generators import all_states, changed
from firecaffe.inventory.network_state import EXTRA_STATE_BYTES


@dataclass(frozen=True)
class Changes:
    frozen: list[str]
    """Parameters without gradient that forward changes, such as a teacher's moving average."""
    in_places: dict[str, str]
    """Buffers of which forward writes only some rows, with a text that says how many."""
    steps: dict[str, int]
    """Whole-number buffers that move by more than 1, such as a queue pointer, and by how much."""
    draws: list[str]


@dataclass
class ForwardWatch:
    """A network's state before a forward; `changes` compares it with the state after."""

    network: nn.Module
    _parameters: dict[str, tuple[nn.Parameter, int, int]] = field(init=False)
    _buffers: dict[str, Tensor] = field(init=False)
    _random: Mapping[str, object] = field(init=False)

    def __post_init__(self) -> None:
        self._parameters = {
            name: (parameter, parameter._version, checksum(parameter))
            for name, parameter in self.network.named_parameters()
        }
        self._buffers = {name: buffer.clone() for name, buffer in self.network.named_buffers()}
        self._random = all_states()

    def changes(self) -> Changes:
        """Compare right after forward. Raises: RecipeError for changes no training can handle."""
        self._check_buffers()
        draws = changed(self._random)
        frozen = self.changed_parameters()
        in_places, steps = {}, {}
        of_batch_norm = {
            f"{name}.{buffer}" if name else buffer
            for name, module in self.network.named_modules()
            if isinstance(module, _NormBase)
            for buffer in module._buffers
        }
        for name, now in self.network.named_buffers():
            before = self._buffers[name]
            is_known = name in of_batch_norm or name.endswith(EXTRA_STATE_BYTES)
            if is_known or torch.equal(before, now):
                continue
            if not now.is_floating_point():
                most = int((now.long() - before.long()).abs().max())
                if most > 1:
                    steps[name] = most
            elif now.ndim:
                rows = (before != now).reshape(len(now), -1).any(1)
                if not bool(rows.all()):
                    in_places[name] = f"{int(rows.sum())} of its {len(now)} rows"
        return Changes(frozen, in_places, steps, draws)

    def changed(self) -> list[str]:
        return [
            name
            for name, (parameter, version, total) in self._parameters.items()
            if parameter._version != version or checksum(parameter) != total
        ]

    def is_trained(self, name: str) -> bool:
        return self._parameters[name][0].requires_grad

    def changed_parameters(self) -> list[str]:
        """Frozen parameters that changed. Raises: RecipeError if a trained one did or is new."""
        now = dict(self.network.named_parameters())
        for name, (parameter, _, _) in self._parameters.items():
            if now.get(name) is not parameter:
                raise RecipeError(
                    f"forward replaces the parameter {name}; expected the "
                    "parameters that the network was made with, which the optimizer updates"
                )
        changed = self.changed()
        if trained := next(filter(self.is_trained, changed), ""):
            raise RecipeError(self._line_of(trained))
        if new := [name for name in now if name not in self._parameters]:
            raise RecipeError(
                f"forward makes the parameter {new[0]}, which no optimizer has; expected all of "
                "them as the network is made"
            )
        return changed

    def _line_of(self, name: str) -> str:
        path, _, _ = name.rpartition(".")
        module = self.network.get_submodule(path)
        said = f"forward changes the parameter {name}, which is trained, too"
        if getattr(module, "max_norm", None) is not None:
            return (
                f"{said}: {type(module).__name__}(max_norm=…) scales the rows that a micro-batch "
                "looks up, so that the number of workers decides them; scale what is looked up "
                "instead: values * (max_norm / values.norm(dim=-1, keepdim=True)).clamp(max=1)"
            )
        return (
            f"{said}, so that the number of workers decides it; expected that the optimizer alone "
            "does. Compute what forward uses from the parameter (torch.nn.utils.parametrize), or "
            "keep what changes by itself in a buffer"
        )

    def _check_buffers(self) -> None:
        now = dict(self.network.named_buffers())
        for name, before in self._buffers.items():
            kind = _kind(now[name]) if name in now else "none"
            if kind != _kind(before):
                raise RecipeError(
                    f"forward makes another kind of tensor of the buffer {name}: it was "
                    f"{_kind(before)}, and is {kind}; expected the same shape and type, as large "
                    "as it will ever be"
                )
        if new := [name for name in now if name not in self._buffers]:
            raise RecipeError(
                f"forward makes the buffer {new[0]}; expected all of them as the network is made"
            )


@torch.no_grad()
def checksum(tensor: Tensor) -> int:
    """Sum a tensor's bits: quick for large weights, and enough to notice a few changes."""
    if not tensor.numel():
        return 0
    bits = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if bits.storage_offset() % 4:
        bits = bits.clone()  # int32 needs an aligned offset
    whole = len(bits) // 4 * 4
    total = bits[:whole].view(torch.int32).sum(dtype=torch.int64) + bits[whole:].sum()
    return int(total)


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
