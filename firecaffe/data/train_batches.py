"""A rank's training batches, fetched ahead in the order in which it requests them."""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch

from firecaffe.data.batches import Batches, ahead, sample_bytes
from firecaffe.data.dataset import Batch, map_batch
from firecaffe.data.look import is_asked_again, same_bits
from firecaffe.data.sample_order import SampleOrder


class TrainBatches(Protocol):
    @property
    def order(self) -> SampleOrder: ...

    def train_batch(self, step: int, leaf: int) -> Batch: ...


@dataclass
class BatchesAhead:
    """Batches for requests of `leaves`, in this order, in each step from `first_step` on."""

    batches: Batches
    leaves: Sequence[int]
    first_step: int
    last_step: int
    """One more than the last step."""
    doubts: list[str] | None = None
    """Receives a warning if a batch differs when it is requested twice. None: no such checks."""
    _next: Iterator[tuple[int, int]] = field(init=False, repr=False)
    _made: Generator[tuple[Batch, bool], None, None] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        batches = self.batches
        batch_bytes = batches.order.micro_batch_size * sample_bytes(batches.dataset)
        self._next = self._places()
        self._made = ahead(self._calls(), batches.dataset, batch_bytes)

    def go_on(self, leaves: Sequence[int], step: int) -> None:
        """Continue with other leaves from `step` on. Waiting batches are dropped."""
        # This waits for the batch being made: a data set need not allow two callers at once.
        self.close()
        self.leaves, self.first_step = leaves, step
        self._begin()

    @property
    def order(self) -> SampleOrder:
        return self.batches.order

    def _places(self) -> Iterator[tuple[int, int]]:
        return (
            (step, leaf) for step in range(self.first_step, self.last_step) for leaf in self.leaves
        )

    def _calls(self) -> Iterator[Callable[[], tuple[Batch, bool]]]:
        return (partial(self._host_batch, *place) for place in self._places())

    # Returns the batch, and whether it differed when it was requested again. It runs in one of
    # several threads, so `train_batch` reports this.
    def _host_batch(self, step: int, leaf: int) -> tuple[Batch, bool]:
        batch, differs = self.batches.host_batch(step, leaf), False
        if self.doubts is not None and leaf == self.leaves[0] and is_asked_again(step):
            differs = not same_bits(batch, self.batches.host_batch(step, leaf))
        if torch.device(self.batches.device).type == "cuda":
            batch = map_batch(lambda tensor: tensor.pin_memory(), batch)
        return batch, differs

    def train_batch(self, step: int, leaf: int) -> Batch:
        """Return `Batches.train_batch`. Errors and doubts appear at this call, not ahead of it."""
        expected = next(self._next)
        if expected != (step, leaf):
            raise RuntimeError(f"asked for {(step, leaf)}, expected {expected}")
        batch, differs = next(self._made)
        if differs and self.doubts is not None:
            self.doubts.append(
                f"the training set draws random numbers: asked once more for samples of step "
                f"{step + 1}, it gave others; batch(indices) must depend on the indices alone"
            )
            self.doubts = None  # warn once
        return self.batches.on_device(*batch)

    def close(self) -> None:
        self._made.close()
