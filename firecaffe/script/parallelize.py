"""DistributedDataParallel with firecaffe's exchange, for a user's own training script.

Each rank contributes one gradient, so bits depend on the number of ranks, as with DDP;
`firecaffe.train` gives the same bits for any number.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn

# From its own module, because a script may have replaced any other name of it by `parallelize`.
from torch.nn.parallel.distributed import DistributedDataParallel

from firecaffe.cluster.from_script import bind, from_script
from firecaffe.cluster.process_settings import keep_freed_memory
from firecaffe.exchange.choose import AUTO
from firecaffe.gradients.config import NO_COMPRESSOR
from firecaffe.script.first_forward import tell_of_own_state
from firecaffe.script.hook import BUCKET_BYTES, HookState, bucket_sizes, exchange_bucket
from firecaffe.script.script_arguments import (
    ArgumentError,
    SecondHookError,
    check_group,
    check_model,
    check_network,
    check_sums_nothing,
    check_words,
)
from firecaffe.script.script_exchange import join_launched_world

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
        """Register the hook; a model on one rank has none yet. Raises SecondHookError."""
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
