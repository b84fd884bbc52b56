"""What a forward of a network changes, and what it draws from: seen around one micro-batch."""

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
    """What one forward has changed."""

    frozen: list[str]
    """Parameters that are not trained, which forward changes, as a teacher's that follows."""
    in_places: dict[str, str]
    """Buffers of which forward writes some rows alone, and how many, in words."""
    steps: dict[str, int]
    """Whole numbers that move by more than 1, as the pointer of a queue, and by how much."""
    draws: list[str]
    """The generators of the process that it draws from."""


@dataclass
class Watch:
    """A network's state before a forward. `changes` tells what it was after."""

    network: nn.Module
    _parameters: dict[str, tuple[nn.Parameter, int, int]] = field(init=False)
    _buffers: dict[str, Tensor] = field(init=False)
    _random: Mapping[str, object] = field(init=False)

    def __post_init__(self) -> None:
        self._parameters = {
            name: (each, each._version, checksum(each))
            for name, each in self.network.named_parameters()
        }
        self._buffers = {name: each.clone() for name, each in self.network.named_buffers()}
        self._random = all_states()

    def changes(self) -> Changes:
        """Call it right after the forward: backward and an update change more.

        Raises: RecipeError if forward changes what cannot be kept the same on any number of
        workers.
        """
        self._check_buffers()
        draws = changed(self._random)
        frozen = self.changed_parameters()
        in_places, steps = {}, {}
        of_batch_norm = {
            f"{name}.{each}" if name else each
            for name, module in self.network.named_modules()
            if isinstance(module, _NormBase)
            for each in module._buffers
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
        """The parameters that forwards have changed."""
        return [
            name
            for name, (parameter, version, total) in self._parameters.items()
            if parameter._version != version or checksum(parameter) != total
        ]

    def is_trained(self, name: str) -> bool:
        return self._parameters[name][0].requires_grad

    def changed_parameters(self) -> list[str]:
        """The parameters, not trained, that forwards have changed.

        Raises: RecipeError if one that is trained has changed, or is another.
        """
        now = dict(self.network.named_parameters())
        for name, (parameter, _, _) in self._parameters.items():
            if now.get(name) is not parameter:
                raise RecipeError(
                    f"forward puts another parameter in the place of {name}; expected the "
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
            found = _kind(now[name]) if name in now else "none"
            if found != _kind(before):
                raise RecipeError(
                    f"forward makes another kind of tensor of the buffer {name}: it was "
                    f"{_kind(before)}, and is {found}; expected the same shape and type, as large "
                    "as it will ever be"
                )
        if new := [name for name in now if name not in self._buffers]:
            raise RecipeError(
                f"forward makes the buffer {new[0]}; expected all of them as the network is made"
            )


@torch.no_grad()
def checksum(tensor: Tensor) -> int:
    """A sum of a tensor's bits, by which a few changes are seen; quick, as weights are large."""
    if not tensor.numel():
        return 0
    bits = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if bits.storage_offset() % 4:
        bits = bits.clone()  # for numbers of four bytes
    whole = len(bits) // 4 * 4
    total = bits[:whole].view(torch.int32).sum(dtype=torch.int64) + bits[whole:].sum()
    return int(total)


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
