"""The exchange of a script's ranks, by the words that it was given."""

from collections.abc import Sequence
from functools import partial

from firecaffe.cluster.group import Group
from firecaffe.errors import RecipeError
from firecaffe.exchange import NATIVE, find_schedule, parse_hierarchical
from firecaffe.exchange.choose import AUTO
from firecaffe.exchange.route import find_route
from firecaffe.gradients.config import NO_COMPRESSOR
from firecaffe.script.group import timeout_of
from firecaffe.transport.auto import AutoChoice, choose_exchange
from firecaffe.transport.exchange import Exchange
from firecaffe.transport.local import meet_local_ranks


def open_exchange(
    world: Group,
    per_host: Sequence[int],
    exchange: str,
    compressor: str,
    sizes_bytes: Sequence[int],
    num_leaves: int | None,
) -> tuple[Exchange, AutoChoice | None]:
    """Opens the exchange of several ranks; all must call it. Returns it with the choice, and its
    reason, if it was to be chosen.

    Args:
        per_host: The ranks of each host.
        exchange: A row of docs/exchange.md, or auto.
        compressor: A codec, or none.
        sizes_bytes: Of the buckets, for exchange "auto".
        num_leaves: As for `find_route`.

    Raises: RecipeError if the exchange does not fit the hosts; PeerLostError.
    """
    _check_hosts(exchange, world, per_host)
    local = None
    if world.device.type == "cpu":
        # The processes' own sockets, which keep to the time of the group's.
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
    """Raises: RecipeError if an exchange does not fit the ranks of the hosts."""
    if exchange in (NATIVE, AUTO):
        return
    if parse_hierarchical(exchange) is not None and len(set(per_host)) > 1:
        found = ", ".join(map(str, per_host))
        raise RecipeError(
            f"exchange: {exchange} needs as many ranks on each host; there are {found}"
        )
    try:
        find_schedule(exchange, world.local_world_size)(world.world_size, 1)
    except ValueError as error:
        raise RecipeError(f"exchange: {error}") from None
