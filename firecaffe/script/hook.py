"""The exchange as a communication hook of DistributedDataParallel, in a thread during backward.

One thread takes buckets in DDP's order, which is the same on all ranks. Backward's thread does the
work itself if the backend needs one order with the messages of a split network's layers, and for
the last bucket of a step, during which no backward runs. `backward()` raises errors unchanged: a
callback at its end, before DDP's, checks every bucket, because DDP would make an error of a future
unreadable.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed import ProcessGroup
from torch.futures import Future

from firecaffe.cluster.agree import agree
from firecaffe.cluster.from_script import from_script
from firecaffe.cluster.group import Group
from firecaffe.exchange.choose import AUTO
from firecaffe.gradients.config import NO_COMPRESSOR
from firecaffe.gradients.threads import begin_thread
from firecaffe.script.script_arguments import check_group, check_words
from firecaffe.script.script_exchange import DDPBucket, RankMean, leave, meet, open_exchange
from firecaffe.transport.auto_exchange import AutoChoice
from firecaffe.transport.worker import Worker

BUCKET_BYTES = 25 * 1024 * 1024
"""The size of DDP's buckets, unless bucket_cap_mb sets another."""

PATIENCE_S = 1.0
"""Seconds for which the end of a program waits for a bucket under way."""

GradHook = Callable[["HookState", GradBucket], Future[Tensor]]


class HookState:
    """The state of `exchange_bucket`: the exchange and its thread.

    It meets the other ranks with the first bucket, because `torch.distributed` may be initialized
    long after the hook was made. A copy meets them with its own first bucket, and begins without a
    compressor's memory. The thread ends with the program or the last reference, and releases its
    process group: one that outlives the interpreter would abort the program.
    """

    def __init__(
        self,
        exchange: str,
        compressor: str,
        timeout_s: float | None = None,
        process_group: ProcessGroup | None = None,
    ) -> None:
        self.exchange = exchange
        self.compressor = compressor
        self.timeout_s = timeout_s
        self.counts_ranks = False
        """Whether the mean is over the ranks that still have inputs (`torch…algorithms.Join`)."""
        self.choice: AutoChoice | None = None
        self._process_group = process_group
        self._world: Group | None = None
        self._mean: RankMean | None = None
        self._worker: Worker | None = None
        self._stream: torch.cuda.Stream | None = None
        self._needs_one_order = False

    def __getstate__(self) -> dict[str, Any]:
        return {
            "exchange": self.exchange,
            "compressor": self.compressor,
            "timeout_s": self.timeout_s,
        }

    def __setstate__(self, words: dict[str, Any]) -> None:
        HookState.__init__(self, **words)

    def meet(self, device: torch.device, sizes_bytes: Sequence[int]) -> Group:
        """Meet the other ranks of the group; all must call it. `sizes_bytes` is for "auto".

        Raises: LaunchError, AgreementError, RecipeError if the exchange does not fit the hosts.
        """
        if self._world is not None:
            return self._world
        world, per_host = meet(self._process_group, device, self.timeout_s)
        agree(world, {"exchange": self.exchange, "compressor": self.compressor})
        if world.exchange_group is not None:
            # Each rank has a vector.
            exchange, self.choice = open_exchange(
                world, per_host, self.exchange, self.compressor, sizes_bytes, None
            )
            torch.get_num_threads()  # fixes this thread's number before the other thread sets one
            self._mean = RankMean(exchange, self.compressor)
            self._worker = Worker("exchange", partial(begin_thread, device))
            if device.type == "cuda":
                self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            weakref.finalize(self, _close, self._worker, self._mean, world)
        self._needs_one_order = world.needs_one_order
        self._world = world
        return world

    def send(self, grad_bucket: GradBucket) -> Future[Tensor]:
        """Exchange a bucket, inside backward or, on a rank without inputs, outside."""
        buffer = grad_bucket.buffer()
        self.meet(buffer.device, bucket_sizes(buffer.numel() * buffer.itemsize))
        result: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
        if self._worker is None:
            result.set_result(buffer)
            return result
        is_active = torch._C._current_graph_task_id() >= 0
        bucket = DDPBucket(
            grad_bucket.index(),
            grad_bucket.is_last(),
            buffer,
            grad_bucket.parameters(),
            is_active,
            self.counts_ranks,
        )
        task = self._task(bucket, result)
        is_last = bucket.is_last or not is_active
        starts_here = self._needs_one_order or (is_last and not buffer.is_cuda)
        done = self._worker.run_here(task) if starts_here else self._worker.submit(task)
        if is_active:
            torch.autograd.Variable._execution_engine.queue_callback(done.result)
        else:
            done.result()
        return result

    def _task(self, bucket: DDPBucket, result: Future[Tensor]) -> Callable[[], None]:
        mean, stream, device = self._mean, self._stream, bucket.buffer.device
        assert mean is not None
        if stream is None:
            return lambda: result.set_result(mean(bucket))
        ready = torch.cuda.current_stream(device).record_event()

        def on_stream() -> None:
            with torch.cuda.stream(stream):
                stream.wait_event(ready)
                result.set_result(mean(bucket))

        return on_stream


def exchange_bucket(state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Exchange a bucket. DDP requires a plain function with a parameter of this name."""
    return state.send(bucket)


@from_script
def ddp_hook(
    exchange: str = AUTO,
    compressor: str = NO_COMPRESSOR,
    *,
    timeout_s: float | None = None,
    process_group: ProcessGroup | None = None,
) -> tuple[HookState, GradHook]:
    """Return (state, hook) for `DistributedDataParallel.register_comm_hook`; one pair for each DDP.

    This joins no world: the ranks meet with the first bucket.

    Args:
        exchange: See `parallelize`.
        compressor: See `parallelize`.
        timeout_s: See `parallelize`.
        process_group: The group that was given to DDP, if any.

    Raises: RecipeError if an argument is impossible, or two do not go together. `backward()` raises
    what `parallelize` raises while ranks meet, and PeerLostError if another rank is lost.
    """
    check_words(exchange, compressor, timeout_s)
    check_group("ddp_hook", process_group)
    return HookState(exchange, compressor, timeout_s, process_group), exchange_bucket


def bucket_sizes(num_bytes: int, largest: int = BUCKET_BYTES) -> list[int]:
    whole, rest = divmod(num_bytes, largest)
    return [largest] * whole + [rest] * (rest > 0)


def _close(worker: Worker, mean: RankMean, world: Group) -> None:
    # If a bucket waits for a lost rank, the thread and its group are left alone.
    worker.close(wait=False)
    if worker.thread is not threading.current_thread():
        worker.thread.join(PATIENCE_S)
    if not worker.thread.is_alive():
        mean.close()
        leave(world)
