"""Exchange beside backward: communication threads, and the device's queue that they fill.

Bucket i goes by lane i mod lanes, and each lane by a thread of its own. Buckets are submitted in
one order on all ranks. Where the backend wants one order also with what backward itself sends, as a
split network's layers do, backward's thread starts each exchange: its place among the others is
then that of the program, the same on all ranks.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial

import torch
from torch import Tensor

from firecaffe.cluster.group import Group
from firecaffe.cluster.world import waiting
from firecaffe.transport.queue import Mark, Queue
from firecaffe.transport.worker import Worker, raise_failure, wait_for

Span = tuple[Mark, Mark]
"""The marks at which an exchange begins and ends."""


class ExchangeThreads:
    """The threads of one reducer. Tensors are on `on`, whose work is in `queue`."""

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
        """Lets the bucket's lane, or this thread, do `work`, once the device has done what is
        queued now. tensors: made here and used there. early: whether it waits for ranks that still
        compute, which is no time of an exchange.
        """
        run = partial(self._run, work, list(tensors), self._queue.mark())
        futures = self._early if early else self._futures
        lane = self._lanes[index % len(self._lanes)]
        futures.append(lane.run_here(run) if self._starts_here else lane.submit(run))

    def finish(self) -> tuple[Span, ...]:
        """Waits until all that was submitted is done, or queued on a device that works behind; what
        this thread queues from here on comes after it.

        Raises: PeerLostError; what a thread has met.
        """
        with waiting(self._world):
            wait_for(self._world, [*self._early, *self._futures], self._lanes)
        spans = tuple(future.result() for future in self._futures)
        self._futures, self._early = [], []
        for _, end in spans:
            self._queue.wait(end)
        return spans

    def raise_failure(self) -> None:
        """Raises the error that a thread has met, if any."""
        raise_failure(self._lanes)

    def close(self, wait: bool) -> None:
        """Ends the threads. wait: for them; one that waits for a lost rank may do so for long."""
        for lane in self._lanes:
            lane.close(wait)

    def _run(self, work: Callable[[], None], tensors: list[Tensor], ready: Mark) -> Span:
        """Does a bucket's work, in a thread."""
        with self._queue.beside(tensors):
            self._queue.wait(ready)
            begin = self._queue.mark()
            work()
            return begin, self._queue.mark()


def begin_thread(device: torch.device) -> None:
    """Prepares a thread that exchanges."""
    # Threads of its own would take cores from backward, which runs at the same time.
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
