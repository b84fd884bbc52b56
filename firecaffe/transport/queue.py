"""Marks by which the host knows what a device has done, without waiting for it.

A call only queues work on a GPU. The host marks places in that queue, lets one queue wait for a
mark in another, and reads results a step later. Marks of a CPU are over at once.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class Mark:
    """A place in a device's queue; a CPU has reached it when it is made."""

    def __init__(self) -> None:
        self.time_s = time.perf_counter()

    def is_over(self) -> bool:
        """Whether the device has reached it. Does not wait."""
        return True

    def seconds_after(self, earlier: Any) -> float:
        """Return seconds from an earlier mark to this one; both are over."""
        return float(self.time_s - earlier.time_s)


class Queue:
    """The work of one rank's device: a queue for its step, and one for its exchange; of a CPU."""

    is_async = False
    """Whether calls return before their work is done."""

    def mark(self) -> Mark:
        """Mark the present place in the queue of the calling thread."""
        return Mark()

    def wait(self, mark: Any) -> None:
        """Let what this thread queues from now on wait for the mark; the host does not wait."""

    @contextmanager
    def beside(self, tensors: Iterable[Tensor] = ()) -> Iterator[None]:
        """Queue the block's work in the exchange's queue; `tensors` come from the current one."""
        yield

    def to_host(self, tensor: Tensor) -> Tensor:
        """Copy a tensor to the host; the copy is complete once a later mark is over."""
        return tensor.clone()


class _Event(Mark):
    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.event.record()

    def is_over(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def seconds_after(self, earlier: "_Event") -> float:
        return float(earlier.event.elapsed_time(self.event)) / 1e3


class GpuQueue(Queue):
    """The current stream of a GPU, and one for the exchange."""

    is_async = True

    def __init__(self, device: torch.device) -> None:
        self._beside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def mark(self) -> Mark:
        return _Event()

    def wait(self, mark: _Event) -> None:
        torch.cuda.current_stream().wait_event(mark.event)

    @contextmanager
    def beside(self, tensors: Iterable[Tensor] = ()) -> Iterator[None]:
        for tensor in tensors:
            tensor.record_stream(self._beside)  # keep its memory until this stream has used it
        with torch.cuda.stream(self._beside):
            yield

    def to_host(self, tensor: Tensor) -> Tensor:
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return pinned.copy_(tensor, non_blocking=True)


def queue_of(device: torch.device) -> Queue:
    return GpuQueue(device) if device.type == "cuda" else Queue()
