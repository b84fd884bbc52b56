"""Buffers such as BatchNorm's running statistics, the same for every number of workers.

Every micro-batch starts from the buffers of the step's start. How it changes them is weighted by
its samples and goes through the same tree as the gradients; the step ends with start + mean change.
Integer buffers (BatchNorm's count of batches) change once a step, as micro-batch 0 changes them.

All buffers of one dtype are made views of one vector, so that a network with a hundred of them
costs a few operations for each micro-batch and not hundreds.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

Place = tuple[dict[str, Tensor | None], str]
"""A module's buffers and a name among them: where a tensor lives."""


@dataclass
class _Group:
    """The buffers of one dtype, as views of `flat`."""

    flat: Tensor
    start: Tensor
    places: list[tuple[Place, Tensor]]

    def put_back(self) -> None:
        self.flat.copy_(self.start)
        for (buffers, name), view in self.places:
            buffers[name] = view

    def collect(self) -> None:
        """Brings what modules put in place of the views into the vector."""
        for (buffers, name), view in self.places:
            now = buffers[name]
            if now is not view and now is not None:
                view.copy_(now)
                buffers[name] = view


class BufferChanges:
    """The changes that one micro-batch makes to a model's buffers, as one flat vector."""

    def __init__(self, model: nn.Module) -> None:
        places: dict[Tensor, list[Place]] = {}
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    places.setdefault(buffer, []).append((module._buffers, name))
        dtypes = dict.fromkeys(buffer.dtype for buffer in places)
        self.dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        self.num_elements = sum(buffer.numel() for buffer in places)
        self._groups = [
            _make_group({b: where for b, where in places.items() if b.dtype == dtype})
            for dtype in dtypes
        ]

    def begin_step(self) -> None:
        """Remembers the buffers that every micro-batch of this step starts from."""
        for group in self._groups:
            group.collect()
            group.start.copy_(group.flat)

    def begin_micro_batch(self) -> None:
        """Puts the step's start back."""
        for group in self._groups:
            group.put_back()

    def take(self, micro_batch: int, weight: float) -> list[Tensor]:
        """The changes of the micro-batch that just ran, times its weight, in flat parts."""
        parts = []
        for group in self._groups:
            group.collect()
            change = (group.flat - group.start).to(self.dtype)
            if group.flat.is_floating_point():
                parts.append(change if weight == 1 else change * weight)
            else:
                parts.append(change if micro_batch == 0 else torch.zeros_like(change))
        return parts

    def finish_step(self, total: Tensor, total_weight: float) -> None:
        """Sets the buffers from the sum of all micro-batches' changes, shape (num_elements,)."""
        sizes = [group.flat.numel() for group in self._groups]
        for group, change in zip(self._groups, total.split_with_sizes(sizes), strict=True):
            group.put_back()
            if group.flat.is_floating_point():
                change = change / total_weight
            group.flat.copy_(group.start.to(self.dtype) + change)


def _make_group(places_of: dict[Tensor, list[Place]]) -> _Group:
    """Moves buffers of one dtype into one vector and puts views of it in their places."""
    flat = torch.cat([buffer.detach().reshape(-1) for buffer in places_of])
    places: list[tuple[Place, Tensor]] = []
    offset = 0
    for buffer, where in places_of.items():
        # .data: each view counts its own changes, or autograd would take one for all.
        view = flat[offset : offset + buffer.numel()].view(buffer.shape).data
        places += [(place, view) for place in where]
        offset += buffer.numel()
    group = _Group(flat, flat.clone(), places)
    group.put_back()
    return group
