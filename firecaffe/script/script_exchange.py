"""The exchange of a script's ranks, over a separate group for each process group."""

import os
import platform
import sys
import weakref
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from firecaffe.cluster.agree import gather_text
from firecaffe.cluster.group import Group
from firecaffe.cluster.groups import backend_for, make_world, meeting, number_of
from firecaffe.cluster.world import TIMEOUT_S
from firecaffe.errors import LaunchError, RecipeError
from firecaffe.exchange import NATIVE, find_schedule, parse_hierarchical
from firecaffe.exchange.choose import AUTO
from firecaffe.exchange.route import find_route
from firecaffe.gradients.config import NO_COMPRESSOR
from firecaffe.transport.auto_exchange import AutoChoice, choose_exchange
from firecaffe.transport.exchange import Exchange
from firecaffe.transport.local_ranks import meet_local_ranks


def join_launched_world(device: torch.device, timeout_s: float | None) -> None:
    """Initialize `torch.distributed` from the launcher's environment. Raises LaunchError."""
    make_world(device, TIMEOUT_S if timeout_s is None else timeout_s)
    # At the end of the program, after the exchange threads, whose finalizers are younger.
    weakref.finalize(_leave, _leave)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def meet(
    group: ProcessGroup | None, device: torch.device, timeout_s: float | None
) -> tuple[Group, list[int]]:
    """Meet the ranks of a group; return this rank's new group, and the ranks of each host.

    All ranks of the group, and only these, must call it. None stands for all ranks and for the
    group's time-out. Raises LaunchError if the ranks do not find each other.
    """
    group = group or dist.group.WORLD
    if group is None:
        raise LaunchError("torch.distributed is not initialized, which the first bucket needs")
    if group.size() == 1:
        return Group(0, 1, device), [1]
    with meeting(group.size()):
        ranks = dist.get_process_group_ranks(group)
        backend = backend_for(device)
        timeout = timeout_of(group, device)
        if timeout_s is not None:
            timeout = timedelta(seconds=timeout_s)
        exchange_group = dist.new_group(
            ranks,
            timeout=timeout,
            backend=backend,
            # Ranks outside of the group do not take part.
            use_local_synchronization=len(ranks) < dist.get_world_size(),
            sort_ranks=False,
        )
        if device.type == "cuda":
            # NCCL needs all ranks in a group's first operation; a schedule may start with some.
            dist.all_reduce(torch.zeros(1, device=device), group=exchange_group)
    world = Group(group.rank(), group.size(), device, exchange_group, exchange_group)
    keys = gather_text(world, host_key())
    per_host = ranks_per_host(keys)
    size = per_host[0] if len(set(per_host)) == 1 else 1
    return Group(
        world.rank,
        world.world_size,
        device,
        exchange_group,
        exchange_group,
        local_rank=world.rank % size,
        local_world_size=size,
    ), per_host


def leave(world: Group) -> None:
    # torch names a subgroup by the number of groups of the process. If a rank destroys one before
    # the others do, the ranks of the next subgroup would not find each other.
    if dist.is_initialized() and world.world_size == dist.get_world_size():
        with suppress(ValueError):  # destroyed already
            dist.destroy_process_group(world.exchange_group)


def timeout_of(group: ProcessGroup, device: torch.device) -> timedelta:
    timeout: timedelta = group._get_backend(device).options._timeout
    return timeout


def ranks_per_host(keys: Sequence[str]) -> list[int]:
    """Return the lengths of runs of ranks on one host, in rank order, from the ranks' host keys."""
    return [len(list(run)) for _, run in groupby(keys)]


def host_key() -> str:
    """Return a key of kernel, network and launcher's host, equal for ranks that share memory."""
    place = ""
    if "LOCAL_RANK" in os.environ:
        place = str(number_of("RANK", 0) - number_of("LOCAL_RANK", 0))
    if not sys.platform.startswith("linux"):
        return f"{platform.node()} {place}"
    kernel = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return f"{kernel} {os.stat('/proc/self/ns/net').st_ino} {place}"


def open_exchange(
    world: Group,
    per_host: Sequence[int],
    exchange: str,
    compressor: str,
    sizes_bytes: Sequence[int],
    num_leaves: int | None,
) -> tuple[Exchange, AutoChoice | None]:
    """Open the exchange of several ranks; all must call it. Return it with the choice of "auto".

    `sizes_bytes` are those of the buckets, for "auto"; for `num_leaves` see `find_route`. Raises
    RecipeError if the exchange does not fit the hosts; PeerLostError.
    """
    _check_hosts(exchange, world, per_host)
    local = None
    if world.device.type == "cpu":
        # The processes' sockets have the time-out of the group.
        assert world.exchange_group is not None
        patience = timeout_of(world.exchange_group, world.device)
        local = meet_local_ranks(world, patience.total_seconds())
    route_by = partial(
        find_route,
        num_leaves=num_leaves,
        world_size=world.world_size,
        ranks_per_host=world.local_world_size,
        shared_memory=local is not None,
        codec=compressor if compressor != NO_COMPRESSOR else "",
    )
    choice = None
    if exchange == AUTO:
        choice = choose_exchange(world, sizes_bytes, route_by("tree"))
    route = route_by(exchange if choice is None else choice.algorithm)
    return Exchange(world, route, local), choice


def _check_hosts(exchange: str, world: Group, per_host: Sequence[int]) -> None:
    if exchange in (NATIVE, AUTO):
        return
    if parse_hierarchical(exchange) is not None and len(set(per_host)) > 1:
        counts = ", ".join(map(str, per_host))
        raise RecipeError(
            f"exchange: {exchange} needs as many ranks on each host; there are {counts}"
        )
    try:
        find_schedule(exchange, world.local_world_size)(world.world_size, 1)
    except ValueError as error:
        raise RecipeError(f"exchange: {error}") from None
