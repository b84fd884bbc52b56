"""Threads that exchange buckets during backward, in the same order on all ranks.

Some backends need one order of all messages: those of exchanges, and those that the layers of a
split network send in backward. Then backward's own thread starts each exchange, in program order.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial

import torch
from torch import Tensor

from firecaffe.cluster.calls import Worker, raise_failure, wait_for
from firecaffe.cluster.group import Group
from firecaffe.cluster.world import waiting
from firecaffe.transport.queue import Mark, Queue

Span = tuple[Mark, Mark]


class ExchangeThreads:
    """The threads of one reducer. Tensors are on the device `on`, whose work is in `queue`."""

    def __init__(self, world: Group, lanes: int, on: torch.device, queue: Queue) -> None:
        self._world, self._queue = world, queue
        self._starts_here = world.needs_one_order
        self._lanes = [Worker("exchange", partial(begin_thread, on)) for _ in range(lanes)]
        self._futures: list[Future[Span]] = []
        self._early: list[Future[Span]] = []

    def submit(
        self,
        index: int,
        work: Callable[[], None],
        tensors: Iterable[Tensor],
        *,
        early: bool = False,
    ) -> None:
        """Run `work` in the lane of bucket `index` after what the device has queued by now.

        `tensors` were made in this thread and are used by `work`. `early`: `work` also waits for
        ranks that still compute, so its time does not count as exchange.
        """
        run = partial(self._run, work, list(tensors), self._queue.mark())
        futures = self._early if early else self._futures
        lane = self._lanes[index % len(self._lanes)]
        futures.append(lane.run_here(run) if self._starts_here else lane.submit(run))

    def finish(self) -> tuple[Span, ...]:
        """Wait until all is done, or queued before what comes next. Raises PeerLostError."""
        with waiting(self._world):
            wait_for([*self._early, *self._futures], self._lanes, self._world.watch.check)
        spans = tuple(future.result() for future in self._futures)
        self._futures, self._early = [], []
        for _, end in spans:
            self._queue.wait(end)
        return spans

    def raise_failure(self) -> None:
        raise_failure(self._lanes)

    def close(self, wait: bool) -> None:
        """End the threads. `wait` for their end, which may take long if a rank is lost."""
        for lane in self._lanes:
            lane.close(wait)

    def _run(self, work: Callable[[], None], tensors: list[Tensor], ready: Mark) -> Span:
        with self._queue.beside(tensors):
            self._queue.wait(ready)
            begin = self._queue.mark()
            work()
            return begin, self._queue.mark()


def begin_thread(device: torch.device) -> None:
    # More threads would take cores from backward, which runs at the same time.
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
