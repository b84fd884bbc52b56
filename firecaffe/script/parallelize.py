"""DistributedDataParallel with our exchange: the way in for a training script of one's own.

    model = firecaffe.parallelize(model)

The rest of the script stays as it is for DDP. Each rank brings one gradient, so the bits that come
out depend on the number of ranks, as they do with DDP; for one result on any number of workers
there is `firecaffe.train`.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn

# Its own module's: a script may have put `parallelize` in the place of any other name of it.
from torch.nn.parallel.distributed import DistributedDataParallel

from firecaffe.cluster.from_script import bind, from_script
from firecaffe.cluster.memory import keep_freed_memory
from firecaffe.exchange.choose import AUTO
from firecaffe.gradients.config import NO_COMPRESSOR
from firecaffe.script.arguments import (
    ArgumentError,
    SecondHookError,
    check_group,
    check_model,
    check_network,
    check_sums_nothing,
    check_words,
)
from firecaffe.script.exchange import join_launched_world
from firecaffe.script.first_forward import tell_of_own_state
from firecaffe.script.hook import BUCKET_BYTES, HookState, bucket_sizes, exchange_bucket

SIGNATURE = inspect.signature(DistributedDataParallel)

WORDS = ("exchange", "compressor", "timeout_s")
"""Those that are not DDP's."""


class Parallelized(DistributedDataParallel):
    """DDP as `parallelize` makes it. Its copies exchange as it does, once they are trained."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        # DDP's copies name the hook, but their reducer does not have it.
        hooks, self._comm_hooks = self._comm_hooks, []
        for hook, hook_state in hooks:
            self.register_comm_hook(hook_state, hook)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """DDP's. Raises: ArgumentError if another DDP is around this one, of which accelerate, say,
        tells nobody: it would sum the gradients, too.
        """
        outer = DistributedDataParallel._active_ddp_module
        if outer not in (None, self) and any(each is self for each in outer.modules()):
            raise ArgumentError(
                "parallelize: the model that it made is in another DistributedDataParallel, so "
                "each gradient would be summed twice; give that one the network itself, and its "
                "gradients go through an exchange by firecaffe.adapters (accelerate, Lightning) or "
                "firecaffe.comm_hook"
            )
        return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Registers `hook` in DDP if there is none yet: one rank alone has none.

        Raises: SecondHookError.
        """
        if self._comm_hooks:
            raise SecondHookError(
                "parallelize has registered its exchange as the model's communication hook, and "
                "DDP takes one; for your own make the model with DistributedDataParallel(module)"
            )
        super().register_comm_hook(state, hook)

    def join_hook(self, **kwargs: Any) -> Any:
        """The hook of `torch.distributed.algorithms.Join`, for uneven inputs."""
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
    """DDP of a model, whose gradients go through an exchange of ours beside backward.

    Joins the launcher's world if `torch.distributed` is not initialized yet (NCCL for a model on a
    GPU, else Gloo), and leaves it when the program ends; a world that is there is used and left
    alone. All ranks of the group must call it, after the model was moved to its device. One rank
    alone has nothing to exchange: it is DDP as it comes, and no gradient is encoded. Ranks of one
    host add in the memory that they share; sparse gradients go through torch's own all_reduce.

    The process keeps the memory that it frees (`cluster.memory`): training on CPUs is faster so.

    Args:
        module: The model, on its device.
        ddp_arguments: DistributedDataParallel's own by position, as device_ids.
        exchange: auto takes the fastest by a link that is measured here, of those that give tree's
            bits, so that every start on so many ranks ends in the same. Or a row of
            docs/exchange.md. The ranks of a host are those that can share memory.
        compressor: A codec of gradients/compressors, applied to each rank's gradient from the
            second step on, for DDP cuts its buckets anew after the first. With a memory of what was
            not sent, which belongs to this rank and is in no checkpoint of the script.
        timeout_s: How long a rank waits for the others before it gives up; by default as long as
            the script's process group does.
        ddp_options: DistributedDataParallel's own by name, as find_unused_parameters or
            process_group.

    Raises: RecipeError if the words cannot be, or not together, or gradients would not go through
    the exchange; LaunchError if the ranks do not find each other; AgreementError if they were given
    different words. From `backward()`: PeerLostError if another rank went away. What DDP refuses,
    it refuses in its own words.
    """
    bound = bind("parallelize", SIGNATURE, (module, *ddp_arguments), ddp_options, WORDS)
    check_network("parallelize", "module", module)
    check_sums_nothing("parallelize", "module", module, "give the network itself")
    check_words(exchange, compressor, timeout_s)
    check_group("parallelize", bound.arguments.get("process_group"))
    check_model(module, compressor, bound.arguments)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    device = trained[0].device
    if device.type == "cuda" and not {"device_ids", "output_device"} & bound.arguments.keys():
        bound.arguments["device_ids"] = [device]
    keep_freed_memory()
    if not dist.is_initialized():
        join_launched_world(device, timeout_s)
    parallel = Parallelized(*bound.args, **bound.kwargs)
    group = parallel.process_group
    if group.size() > 1:
        state = HookState(exchange, compressor, timeout_s, group)
        largest = bound.arguments.get("bucket_cap_mb")
        cap_bytes = BUCKET_BYTES if largest is None else max(1, int(largest * 1024 * 1024))
        state.meet(device, bucket_sizes(sum(p.nbytes for p in trained), cap_bytes))
        parallel.register_comm_hook(state, exchange_bucket)
        tell_of_own_state(parallel.module, "parallelize", averages=False)
    return parallel
