"""Buffers such as BatchNorm's running statistics, the same for every number of workers.

Every micro-batch starts from the buffers of the step's start. How it changes them is weighted by
its samples and goes through the same tree as the gradients; the step ends with start + mean change.
Integer buffers (BatchNorm's count of batches) change once a step, as micro-batch 0 changes them.
"""

import torch
from torch import Tensor, nn


class BufferChanges:
    """The changes that one micro-batch makes to a model's buffers, as one flat vector."""

    def __init__(self, model: nn.Module) -> None:
        self.buffers = [buffer for _, buffer in model.named_buffers()]
        double = any(buffer.dtype == torch.float64 for buffer in self.buffers)
        self.dtype = torch.float64 if double else torch.float32
        self.num_elements = sum(buffer.numel() for buffer in self.buffers)
        self._start: list[Tensor] = []

    def begin_step(self) -> None:
        """Remembers the buffers that every micro-batch of this step starts from."""
        self._start = [buffer.clone() for buffer in self.buffers]

    def begin_micro_batch(self) -> None:
        """Puts the step's start back."""
        if self.buffers:
            torch._foreach_copy_(self.buffers, self._start)

    def take(self, micro_batch: int, weight: float) -> list[Tensor]:
        """The changes of the micro-batch that just ran, times its weight; flat parts in order."""
        changes = []
        for buffer, start in zip(self.buffers, self._start, strict=True):
            change = buffer.to(self.dtype) - start.to(self.dtype)
            if buffer.is_floating_point():
                change *= weight
            elif micro_batch != 0:
                change.zero_()
            changes.append(change.reshape(-1))
        return changes

    def finish_step(self, total: Tensor, total_weight: float) -> None:
        """Sets the buffers from the sum of all micro-batches' changes, shape (num_elements,)."""
        offset = 0
        for buffer, start in zip(self.buffers, self._start, strict=True):
            change = total[offset : offset + buffer.numel()].view(buffer.shape)
            if buffer.is_floating_point():
                change = change / total_weight
            buffer.copy_(start.to(self.dtype) + change)
            offset += buffer.numel()
