"""Our exchange as a communication hook of DistributedDataParallel, in a thread beside backward.

DDP calls the hook in the thread that runs backward; the hook queues the bucket and returns. One
thread takes buckets in the order in which DDP hands them out, which is the same on all ranks, and
sets each bucket's future. What goes wrong in the thread comes out of `backward()` as it is: a
callback at the end of backward, before DDP's own, looks at every bucket.
"""

import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from firecaffe.comm.exchange import Exchange
from firecaffe.comm.wire import NodeWire
from firecaffe.comm.world import World
from firecaffe.errors import RecipeError
from firecaffe.gradients.buckets import layout_of, make_bucket
from firecaffe.gradients.compressors import make_compressor
from firecaffe.gradients.compressors.codec import ROW
from firecaffe.gradients.compressors.wire import Compressor
from firecaffe.gradients.config import NO_COMPRESSOR

PATIENCE_S = 1.0
"""How long the end of a program waits for a bucket that is still under way."""


@dataclass(frozen=True)
class Task:
    """One bucket on its way: what DDP told of it, and where the outcome goes."""

    index: int
    is_last: bool
    buffer: Tensor
    """The gradients of `parameters`, one after the other as they lie in memory."""
    parameters: Sequence[Tensor]
    mean: torch.futures.Future[Tensor]
    """For DDP, which would make any error here an unreadable one."""
    ready: torch.cuda.Event | None = None
    done: "Future[None]" = field(default_factory=Future)
    """For the callback at the end of backward."""


class HookState:
    """The state of `exchange_bucket`: the thread, and the way to it.

    The thread ends with the program or with the last reference, and lets go of its process group
    then: one that outlives the interpreter would abort the program.
    """

    def __init__(self, world: World, algorithm: str, compressor: str) -> None:
        self.world_size = world.world_size
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        if world.world_size == 1:
            return
        torch.get_num_threads()  # fixes this thread's number, before the other one sets its own
        mean = RankMean(world, algorithm, compressor)
        thread = threading.Thread(
            target=_work, args=(self._tasks, mean, world.device), name="exchange", daemon=True
        )
        thread.start()
        weakref.finalize(self, _close, self._tasks, thread, world)

    def send(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Queues a bucket. To be called inside backward."""
        buffer = bucket.buffer()
        if self.world_size == 1:
            alone: torch.futures.Future[Tensor] = torch.futures.Future()
            alone.set_result(buffer)
            return alone
        task = Task(
            bucket.index(),
            bucket.is_last(),
            buffer,
            bucket.parameters(),
            torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None),
            torch.cuda.current_stream(buffer.device).record_event() if buffer.is_cuda else None,
        )
        torch.autograd.Variable._execution_engine.queue_callback(task.done.result)
        self._tasks.put(task)
        return task.mean


def exchange_bucket(state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The hook. DDP asks for a plain function with a parameter of this name."""
    return state.send(bucket)


class RankMean:
    """Turns buckets into their mean over all ranks, in place. For the exchange thread alone."""

    def __init__(self, world: World, algorithm: str, compressor: str) -> None:
        self._world = world
        self._exchange = Exchange(world, algorithm)
        self._compressor = compressor
        self._wire = NodeWire(world, world.world_size)
        self._is_first_step = True
        self._names: dict[Tensor, str] = {}
        self._coded: dict[int, CodedBucket] = {}
        self._memory: dict[str, Tensor] = {}

    def __call__(self, task: Task) -> None:
        buffer = task.buffer
        # Before the sum, as DDP does it: nothing overflows that would not in the mean.
        buffer.div_(self._world.world_size)
        # DDP cuts its buckets anew after the first step.
        if self._compressor == NO_COMPRESSOR or self._is_first_step:
            self._exchange.all_reduce(buffer)
        else:
            self._reduce_coded(task)
        if task.is_last:
            self._is_first_step = False

    def _reduce_coded(self, task: Task) -> None:
        check_encodable(self._compressor, task.buffer.dtype)
        coded = self._coded.get(task.index)
        if coded is None or not coded.holds(task.parameters):
            coded = self._lay_out(task, is_stale=coded is not None)
        parts = task.buffer.split_with_sizes([p.numel() for p in task.parameters])
        torch._foreach_copy_(coded.parts_of(coded.vector), parts)
        nodes = [(self._world.rank, coded.vector)]
        torch._foreach_copy_(parts, coded.parts_of(coded.compressor.reduce(0, nodes, self._wire)))

    def _lay_out(self, task: Task, is_stale: bool) -> "CodedBucket":
        """Makes the aligned vector of a bucket; memory follows the parameters."""
        if is_stale:
            for coded in self._coded.values():
                self._memory |= coded.compressor.state()
            self._coded.clear()
        for parameter in task.parameters:
            # By the order in which DDP shows them, which is the same on all ranks.
            self._names.setdefault(parameter, f"parameter{len(self._names)}")
        names = [self._names[parameter] for parameter in task.parameters]
        bucket = make_bucket(
            task.parameters,
            range(len(names)),
            multiple=self._world.world_size * ROW,
            allocate=lambda size, dtype, device: torch.zeros(size, dtype=dtype, device=device),
            alignment=ROW,
        )
        layout = layout_of(bucket, names)
        compressor = make_compressor(self._compressor, [layout])
        own = [key for key in self._memory if key.partition(".")[2] in names]
        compressor.load_state({key: self._memory.pop(key) for key in own}, [self._world.rank])
        coded = CodedBucket(task.parameters, bucket.flat, layout.spans, compressor)
        self._coded[task.index] = coded
        return coded


@dataclass(frozen=True)
class CodedBucket:
    """A bucket of DDP's as a compressor wants it, every parameter at a multiple of `ROW`."""

    parameters: Sequence[Tensor]
    vector: Tensor
    spans: tuple[tuple[int, int], ...]
    compressor: Compressor

    def holds(self, parameters: Sequence[Tensor]) -> bool:
        return len(parameters) == len(self.parameters) and all(
            a is b for a, b in zip(parameters, self.parameters, strict=True)
        )

    def parts_of(self, vector: Tensor) -> list[Tensor]:
        return [vector[start:stop] for start, stop in self.spans]


def check_encodable(compressor: str, dtype: torch.dtype) -> None:
    """Raises: RecipeError where gradients of a type cannot be encoded."""
    if compressor != NO_COMPRESSOR and dtype != torch.float32:
        raise RecipeError(f"compressor {compressor} encodes float32 gradients; some are {dtype}")


def _work(tasks: "SimpleQueue[Task | None]", mean: RankMean, device: torch.device) -> None:
    """The exchange thread. Once a bucket failed, the group is unusable and all others fail too."""
    # Threads of its own would take cores from backward, which runs at the same time.
    torch.set_num_threads(1)
    stream = None
    if device.type == "cuda":
        torch.cuda.set_device(device)
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    failure: Exception | None = None
    while (task := tasks.get()) is not None:
        with torch.cuda.stream(stream):
            if failure is None:
                try:
                    if stream is not None and task.ready is not None:
                        stream.wait_event(task.ready)
                    mean(task)
                except Exception as error:
                    failure = error
            if failure is None:
                task.mean.set_result(task.buffer)
                task.done.set_result(None)
            else:
                task.done.set_exception(failure)
        del task


def _close(tasks: "SimpleQueue[Task | None]", thread: threading.Thread, world: World) -> None:
    """Ends the thread and its process group; leaves both where a bucket waits for a lost rank."""
    tasks.put(None)
    if thread is not threading.current_thread():
        thread.join(PATIENCE_S)
    if not thread.is_alive() and dist.is_initialized():
        with suppress(ValueError):  # destroyed already
            dist.destroy_process_group(world.exchange_group)
