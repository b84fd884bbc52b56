"""DistributedDataParallel with our exchange: the way in for a training script of one's own.

    model = firecaffe.parallelize(model, exchange="tree")

The rest of the script stays as it is for DDP. Each rank brings one gradient, so the bits that come
out depend on the number of ranks, as they do with DDP; for one result on any number of workers
there is `firecaffe.train`.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket, HashStore
from torch.nn.parallel import DistributedDataParallel

from firecaffe.comm.agree import agree
from firecaffe.comm.groups import backend_for, meet, number_of, who_am_i
from firecaffe.comm.memory import keep_freed_memory
from firecaffe.comm.world import TIMEOUT_S, World
from firecaffe.ddp_hook import HookState, check_encodable, exchange_bucket
from firecaffe.errors import RecipeError
from firecaffe.exchange import NATIVE, find_schedule, parse_hierarchical
from firecaffe.exchange.order import keeps_tree_order
from firecaffe.gradients.compressors import COMPRESSORS
from firecaffe.gradients.config import NO_COMPRESSOR, check_timeout

GradHook = Callable[[HookState, GradBucket], torch.futures.Future[Tensor]]


def parallelize(
    model: nn.Module,
    exchange: str = "tree",
    compressor: str = NO_COMPRESSOR,
    *,
    timeout_s: float = TIMEOUT_S,
    **ddp_options: Any,
) -> DistributedDataParallel:
    """DDP of a model, whose gradients go through an exchange of ours beside backward.

    Joins torchrun's world where `torch.distributed` is not initialized yet (NCCL for a model on a
    GPU, else Gloo), and leaves it when the program ends; a world that is there is used and left
    alone. All ranks must call it, after the model was moved to its device. A world of one rank has
    nothing to exchange: it is DDP as it comes, and no gradient is encoded.

    The process keeps the memory that it frees (`comm.memory`), which makes training on CPUs faster.

    Args:
        exchange: A row of docs/exchange.md; hierarchical(INNER,OUTER) goes by LOCAL_WORLD_SIZE.
        compressor: A codec of gradients/compressors, applied to each rank's gradient from the
            second step on, for DDP cuts its buckets anew after the first. With a memory of what was
            not sent, which belongs to this rank and is in no checkpoint of the script.
        timeout_s: How long a rank waits for the others before it gives up.
        ddp_options: DistributedDataParallel's own, such as find_unused_parameters.

    Raises: RecipeError where the words cannot be, or not together, or a compressor meets parameters
    that are not float32; LaunchError where the ranks do not find each other; AgreementError where
    they were given different words. From `backward()`: PeerLostError where another rank went away.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise RecipeError("the model has no parameter to train")
    _check_words(exchange, compressor)
    check_timeout("timeout_s", timeout_s)
    for parameter in parameters:
        check_encodable(compressor, parameter.dtype)
    keep_freed_memory()
    device = parameters[0].device
    state, hook = comm_hook(exchange, compressor, device=device, timeout_s=timeout_s)
    if device.type == "cuda" and not {"device_ids", "output_device"} & ddp_options.keys():
        ddp_options["device_ids"] = [device]
    parallel = DistributedDataParallel(model, **ddp_options)
    if state.world_size > 1:
        parallel.register_comm_hook(state, hook)
    return parallel


def comm_hook(
    exchange: str = "tree",
    compressor: str = NO_COMPRESSOR,
    *,
    device: torch.device | str = "cpu",
    timeout_s: float = TIMEOUT_S,
) -> tuple[HookState, GradHook]:
    """(state, hook) for `DistributedDataParallel.register_comm_hook`, over all ranks.

    All ranks must call it, and each DDP needs a pair of its own. device: where the gradients are.
    Otherwise as `parallelize`, the errors too.
    """
    _check_words(exchange, compressor)
    check_timeout("timeout_s", timeout_s)
    world = _world(torch.device(device), timeout_s)
    if exchange != NATIVE:
        try:
            find_schedule(exchange, world.local_world_size)(world.world_size, 1)
        except ValueError as error:
            raise RecipeError(f"exchange: {error}") from None
    agree(
        world,
        {
            "exchange": exchange,
            "compressor": compressor,
            "the number of ranks on its host": str(world.local_world_size)
            if parse_hierarchical(exchange) is not None
            else "",
        },
    )
    return HookState(world, exchange, compressor), exchange_bucket


def _check_words(exchange: str, compressor: str) -> None:
    if exchange != NATIVE:
        try:
            find_schedule(exchange)
        except ValueError as error:
            raise RecipeError(f"exchange: {error}") from None
    if compressor not in (NO_COMPRESSOR, *COMPRESSORS):
        known = ", ".join((NO_COMPRESSOR, *COMPRESSORS))
        raise RecipeError(f"compressor is {compressor!r}; it must be one of {known}")
    if compressor != NO_COMPRESSOR and not keeps_tree_order(exchange):
        raise RecipeError(
            f"compressor {compressor} adds in the order of the tree, which exchange {exchange} "
            "does not keep; use tree"
        )


def _world(device: torch.device, timeout_s: float) -> World:
    """This rank among all, with a process group for the exchange thread alone."""
    rank, world_size = who_am_i()
    if world_size == 1:
        if not dist.is_initialized():  # DDP wants one
            dist.init_process_group(backend_for(device), store=HashStore(), rank=0, world_size=1)
            _leave_at_end()
        return World(0, 1, device)
    groups = meet(device, timeout_s)
    if groups.made_world:
        _leave_at_end()
    return World(
        rank,
        world_size,
        device,
        groups.main,
        groups.exchange,
        number_of("LOCAL_RANK", 0),
        number_of("LOCAL_WORLD_SIZE", 1),
    )


def _leave_at_end() -> None:
    """At the end of the program, after the exchange threads, whose finalizers are younger."""
    weakref.finalize(_leave, _leave)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
