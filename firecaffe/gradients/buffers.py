"""Buffers such as BatchNorm's running statistics, the same for every number of workers.

Every micro-batch starts from the buffers of the step's start. How it changes them is weighted by
its samples and goes through the same tree as the gradients; the step ends with start + mean change.
Integer buffers (BatchNorm's count of batches) change once a step, as micro-batch 0 changes them.

All buffers of one dtype are made views of one vector, so that a network with a hundred of them
costs a few operations for each micro-batch and not hundreds.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from firecaffe.errors import RecipeError

BufferEntry = tuple[dict[str, Tensor | None], str]
"""A module's buffers and a name among them: where a tensor lives."""


@dataclass
class _FlatBuffers:
    """The buffers of one dtype, as views of `flat`. A module may put other tensors in places."""

    flat: Tensor
    start: Tensor
    views: list[tuple[Tensor, list[BufferEntry]]]

    def put_back(self) -> None:
        """Puts the step's start into the views, and the views into their places."""
        self.flat.copy_(self.start)
        for view, places in self.views:
            for buffers, name in places:
                buffers[name] = view

    def now(self) -> Tensor:
        """The values in the places, as one vector. Nothing is written: backward may still need
        them.
        """
        tensors = [buffers[name] for _, ((buffers, name), *_) in self.views]
        if all(now is view for now, (view, _) in zip(tensors, self.views, strict=True)):
            return self.flat
        return torch.cat([now.reshape(-1) for now in tensors if now is not None])


class BufferChanges:
    """The changes that one micro-batch makes to a model's buffers, as one flat vector."""

    def __init__(self, model: nn.Module) -> None:
        """Raises: RecipeError if a buffer is complex."""
        places: dict[Tensor, list[BufferEntry]] = {}
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    places.setdefault(buffer, []).append((module._buffers, name))
                    if buffer.is_complex():
                        raise RecipeError(f"buffer {name} is complex; keep it as real numbers")
        dtypes = dict.fromkeys(buffer.dtype for buffer in places)
        self.dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        self._by_dtype = [
            _make_flat({b: where for b, where in places.items() if b.dtype == dtype})
            for dtype in dtypes
        ]

    def begin_step(self) -> None:
        """Remembers the buffers that every micro-batch of this step starts from."""
        for buffers in self._by_dtype:
            buffers.start.copy_(buffers.now())
            buffers.put_back()

    def begin_micro_batch(self) -> None:
        """Puts the step's start back."""
        for buffers in self._by_dtype:
            buffers.put_back()

    def no_changes(self) -> list[Tensor]:
        """The changes that `take` returns if nothing has changed."""
        return [torch.zeros_like(buffers.start, dtype=self.dtype) for buffers in self._by_dtype]

    @torch.no_grad()
    def take(self, micro_batch: int, weight: float) -> list[Tensor]:
        """The changes of the micro-batch that just ran, times its weight, in flat parts."""
        parts = []
        for buffers in self._by_dtype:
            now, start = buffers.now(), buffers.start
            if start.is_floating_point():
                # No change is 0 also where both are infinite, as in an attention mask.
                change = torch.where(now == start, 0, now - start).to(self.dtype)
                parts.append(change if weight == 1 else change * weight)
            elif micro_batch == 0:
                parts.append((now.long() - start.long()).to(self.dtype))
            else:
                parts.append(torch.zeros(start.shape, dtype=self.dtype, device=start.device))
        return parts

    def finish_step(self, totals: Sequence[Tensor], total_weight: float) -> None:
        """Sets the buffers from the sums of all micro-batches' changes, as `take` gives them."""
        for buffers, change in zip(self._by_dtype, totals, strict=True):
            buffers.put_back()
            start = buffers.start
            if start.is_floating_point():
                moved = (start.to(self.dtype) + change / total_weight).to(start.dtype)
            else:
                moved = (start.long() + change.round().long()).to(start.dtype)
            buffers.flat.copy_(torch.where(change == 0, start, moved))


def _make_flat(places_of: dict[Tensor, list[BufferEntry]]) -> _FlatBuffers:
    """Moves buffers of one dtype into one vector and puts views of it in their places."""
    flat = torch.cat([buffer.detach().reshape(-1) for buffer in places_of])
    views: list[tuple[Tensor, list[BufferEntry]]] = []
    offset = 0
    for buffer, places in places_of.items():
        # .data: each view counts its own changes, or autograd would take one for all.
        view = flat[offset : offset + buffer.numel()].view(buffer.shape).data
        views.append((view, places))
        offset += buffer.numel()
    buffers = _FlatBuffers(flat, flat.clone(), views)
    buffers.put_back()
    return buffers
