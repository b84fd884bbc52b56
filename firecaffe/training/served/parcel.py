"""Named tensors in one run of bytes, as they go over a lane."""

from collections.abc import Mapping

import torch
from torch import Tensor

ALIGNMENT = 64
"""Bytes between whose multiples tensors begin."""


class Parcel:
    """Memory on the host for tensors of known types and shapes; both ends make it alike."""

    def __init__(self, examples: Mapping[str, Tensor], data: Tensor | None = None) -> None:
        """data: `parcel_bytes` of memory that are used; without, they are made."""
        self.places: dict[str, int] = {}
        """The byte at which each tensor begins."""
        places, end = self.places, 0
        for name, each in examples.items():
            places[name] = end
            end += _aligned(each)
        self.data = torch.zeros(end, dtype=torch.uint8) if data is None else data
        """All bytes."""
        self.views = {
            name: self.data[places[name] : places[name] + each.numel() * each.dtype.itemsize]
            .view(each.dtype)
            .view(each.shape)
            for name, each in examples.items()
        }
        """The tensors, as views of the bytes."""

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies tensors in; the others stay as they are."""
        for name, each in tensors.items():
            self.views[name].copy_(each.detach())


def parcel_bytes(examples: Mapping[str, Tensor]) -> int:
    """The length of a parcel."""
    return sum(map(_aligned, examples.values()))


def _aligned(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.dtype.itemsize // ALIGNMENT) * ALIGNMENT
