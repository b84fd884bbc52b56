"""Buffers such as BatchNorm's running statistics, the same for every number of workers.

Every micro-batch starts from the buffers of the step's start. How it changes them is weighted by
its samples and goes through the same tree as the gradients; the step ends with start + mean change.
Integer buffers (BatchNorm's count of batches) change once a step, as micro-batch 0 changes them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class BufferChanges:
    """The changes that one micro-batch makes to a model's buffers, as one flat vector."""

    def __init__(self, model: nn.Module) -> None:
        # Where each buffer lives, not the tensor: a module may put another one in its place.
        places: dict[Tensor, tuple[dict[str, Tensor | None], str]] = {}
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    places.setdefault(buffer, (module._buffers, name))
        self._means = [place for b, place in places.items() if b.is_floating_point()]
        self._counts = [place for b, place in places.items() if not b.is_floating_point()]
        double = any(buffer.dtype == torch.float64 for buffer in places)
        self.dtype = torch.float64 if double else torch.float32
        self.num_elements = sum(buffer.numel() for buffer in places)
        self._start_means: list[Tensor] = []
        self._start_counts: list[Tensor] = []
        self._no_counts = _flatten([torch.zeros_like(b) for b in _at(self._counts)], self.dtype)

    def begin_step(self) -> None:
        """Remembers the buffers that every micro-batch of this step starts from."""
        self._start_means = [buffer.clone() for buffer in _at(self._means)]
        self._start_counts = [buffer.clone() for buffer in _at(self._counts)]

    def begin_micro_batch(self) -> None:
        """Puts the step's start back."""
        if self._means:
            torch._foreach_copy_(_at(self._means), self._start_means)
        if self._counts:
            torch._foreach_copy_(_at(self._counts), self._start_counts)

    def take(self, micro_batch: int, weight: float) -> list[Tensor]:
        """The changes of the micro-batch that just ran, times its weight, in flat parts."""
        parts: list[Tensor] = []
        if self._means:
            changes = torch._foreach_sub(_at(self._means), self._start_means)
            mean = _flatten(changes, self.dtype)
            parts.append(mean if weight == 1 else mean * weight)
        if self._counts and micro_batch == 0:
            now, start = _at(self._counts), self._start_counts
            parts.append(_flatten(now, self.dtype) - _flatten(start, self.dtype))
        elif self._counts:
            parts.append(self._no_counts)
        return parts

    def finish_step(self, total: Tensor, total_weight: float) -> None:
        """Sets the buffers from the sum of all micro-batches' changes, shape (num_elements,)."""
        num_means = sum(start.numel() for start in self._start_means)
        means, counts = total[:num_means] / total_weight, total[num_means:]
        _advance(_at(self._means), self._start_means, means)
        _advance(_at(self._counts), self._start_counts, counts)


def _at(places: list[tuple[dict[str, Tensor | None], str]]) -> list[Tensor]:
    """The tensors that are in these places now."""
    return [buffers[name] for buffers, name in places]  # type: ignore[misc]


def _flatten(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    if not tensors:
        return torch.zeros(0, dtype=dtype)
    # Most are one-dimensional; a needless reshape of each costs more than all the rest.
    return torch.cat([t if t.ndim == 1 else t.reshape(-1) for t in tensors]).to(dtype)


def _advance(buffers: list[Tensor], starts: list[Tensor], changes: Tensor) -> None:
    offset = 0
    for buffer, start in zip(buffers, starts, strict=True):
        change = changes[offset : offset + buffer.numel()].view(buffer.shape)
        buffer.copy_(start.to(changes.dtype) + change)
        offset += buffer.numel()
