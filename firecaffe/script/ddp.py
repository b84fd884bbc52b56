"""DistributedDataParallel with firecaffe's exchange, for a user's own training script.

Each rank contributes one gradient, so bits depend on the number of ranks, as with DDP. The exchange
is a communication hook, in a thread during backward.

One thread exchanges buckets in DDP's order, the same on all ranks: backward's own if the backend
needs one order for buckets and the messages of split layers, and for a step's last bucket, during
which no backward runs. A callback at backward's end, before DDP's, checks every bucket, because DDP
would make an error of a future unreadable.
"""

import inspect
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed import ProcessGroup
from torch.futures import Future

# Import it from its own module: a script may have replaced its other names by `parallelize`.
from torch.nn.parallel.distributed import DistributedDataParallel

from firecaffe.cluster.agree import agree
from firecaffe.cluster.calls import Worker
from firecaffe.cluster.from_script import bind, from_script
from firecaffe.cluster.group import Group
from firecaffe.cluster.process_settings import keep_freed_memory
from firecaffe.exchange import AUTO
from firecaffe.gradients.config import NO_COMPRESSOR
from firecaffe.gradients.threads import begin_thread
from firecaffe.script.script_arguments import (
    ArgumentError,
    SecondHookError,
    check_group,
    check_model,
    check_network,
    check_not_wrapped,
    check_words,
    warn_of_own_state,
)
from firecaffe.script.script_exchange import (
    DDPBucket,
    RankMean,
    join_launched_world,
    leave,
    meet,
    open_exchange,
)
from firecaffe.transport.auto_exchange import AutoChoice

BUCKET_BYTES = 25 * 1024 * 1024
"""The size of DDP's buckets, unless bucket_cap_mb sets another."""

PATIENCE_S = 1.0
"""Seconds for which a program's end waits for a bucket in flight."""

GradHook = Callable[["HookState", GradBucket], Future[Tensor]]


class HookState:
    """The state of `exchange_bucket`: the exchange and its thread.

    It meets the other ranks with the first bucket, because `torch.distributed` may be initialized
    long after the hook was made; so does a copy, which begins without a compressor's memory. The
    thread ends with the program or the last reference, and releases its process group: one that
    outlives the interpreter would abort the program.
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
        """Meet the ranks of the group; all must call it. `sizes_bytes` is for "auto".

        Raises: LaunchError, AgreementError, RecipeError if the exchange does not fit the hosts.
        """
        if self._world is not None:
            return self._world
        world, per_host = meet(self._process_group, device, self.timeout_s)
        agree(world, {"exchange": self.exchange, "compressor": self.compressor})
        if world.exchange_group is not None:
            # Each rank contributes one vector, so num_leaves is None.
            exchange, self.choice = open_exchange(
                world, per_host, self.exchange, self.compressor, sizes_bytes, None
            )
            torch.get_num_threads()  # fixes this thread's number before the other thread sets one
            self._mean = RankMean(exchange)
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
    # If a bucket still waits for a lost rank, neither the thread nor its group is ended.
    worker.close(wait=False)
    if worker.thread is not threading.current_thread():
        worker.thread.join(PATIENCE_S)
    if not worker.thread.is_alive():
        mean.close()
        leave(world)


SIGNATURE = inspect.signature(DistributedDataParallel)

WORDS = ("exchange", "compressor", "timeout_s")


class Parallelized(DistributedDataParallel):
    """The DDP that `parallelize` makes. Its copies exchange as it does, once they are trained."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        # DDP's copies name the hook, but their reducer does not have it.
        hooks, self._comm_hooks = self._comm_hooks, []
        for hook, hook_state in hooks:
            self.register_comm_hook(hook_state, hook)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        # Wrappers such as accelerate may put another DDP, which would sum too, around this one.
        outer = DistributedDataParallel._active_ddp_module
        if outer not in (None, self) and any(module is self for module in outer.modules()):
            raise ArgumentError(
                "parallelize: the model that it made is in another DistributedDataParallel, so "
                "each gradient would be summed twice; give that one the network itself, and its "
                "gradients go through an exchange by firecaffe.adapters (accelerate, Lightning) or "
                "firecaffe.adapt.ddp_hook"
            )
        return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        if self._comm_hooks:
            raise SecondHookError(
                "parallelize has registered its exchange as the model's communication hook, and "
                "DDP takes one; for your own make the model with DistributedDataParallel(module)"
            )
        super().register_comm_hook(state, hook)

    def join_hook(self, **kwargs: Any) -> Any:
        for _, hook_state in self._comm_hooks:
            if isinstance(hook_state, HookState):
                every_rank = kwargs.get("divide_by_initial_world_size", True)
                hook_state.counts_ranks = not every_rank
        return super().join_hook(**kwargs)  # type: ignore[no-untyped-call]


@from_script
def parallelize(
    module: nn.Module,
    *ddp_arguments: Any,
    exchange: str = AUTO,
    compressor: str = NO_COMPRESSOR,
    timeout_s: float | None = None,
    **ddp_options: Any,
) -> DistributedDataParallel:
    """Wrap a model in DDP whose gradients go through an exchange during backward.

    This joins the launcher's world if `torch.distributed` is not initialized yet (NCCL for a model
    on a GPU, else Gloo), and leaves it when the program ends; an existing world is used and left
    alone. All ranks of the group must call it, after the model was moved to its device. One rank
    alone has nothing to exchange: it gets plain DDP, and no gradient is encoded. Ranks of one host
    add in shared memory; sparse gradients go through torch's own all_reduce. The process keeps the
    memory that it frees (`cluster.process_settings`), which makes training on CPUs faster.

    Args:
        module: The model, on its device.
        ddp_arguments: DistributedDataParallel's own arguments by position, as device_ids.
        exchange: auto measures a link and chooses the fastest of the algorithms that give tree's
            bits, so that every start on the same number of ranks gives the same result. Or a row
            of docs/explanation/exchange.md. The ranks of a host are those that can share memory.
        compressor: A codec of gradients/compressors, applied to each rank's gradient from the
            second step on, because DDP cuts its buckets anew after the first. Its memory of what
            was not sent belongs to this rank and is in no checkpoint of the script.
        timeout_s: Seconds that a rank waits for the others before it gives up; by default the
            time-out of the script's process group.
        ddp_options: DistributedDataParallel's own arguments by name, as find_unused_parameters or
            process_group.

    Raises: RecipeError if an argument is impossible, two do not go together, or gradients would not
    go through the exchange; LaunchError if the ranks do not find each other; AgreementError if they
    have different arguments. `backward()` raises PeerLostError if another rank is lost. DDP's own
    errors are not changed.
    """
    bound = bind("parallelize", SIGNATURE, (module, *ddp_arguments), ddp_options, WORDS)
    check_network("parallelize", "module", module)
    check_not_wrapped("parallelize", "module", module, "give the network itself")
    check_words(exchange, compressor, timeout_s)
    check_group("parallelize", bound.arguments.get("process_group"))
    check_model(module, compressor, bound.arguments)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    device = trained[0].device
    if device.type == "cuda" and not {"device_ids", "output_device"} & bound.arguments.keys():
        bound.arguments["device_ids"] = [device]
    keep_freed_memory()
    join_launched_world(device, timeout_s)
    parallel = Parallelized(*bound.args, **bound.kwargs)
    group = parallel.process_group
    if group.size() > 1:
        state = HookState(exchange, compressor, timeout_s, group)
        largest = bound.arguments.get("bucket_cap_mb")
        cap_bytes = BUCKET_BYTES if largest is None else max(1, int(largest * 1024 * 1024))
        state.meet(device, bucket_sizes(sum(p.nbytes for p in trained), cap_bytes))
        parallel.register_comm_hook(state, exchange_bucket)
        warn_of_own_state(parallel.module, "parallelize", averages=False)
    return parallel
