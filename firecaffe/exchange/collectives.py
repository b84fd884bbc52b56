"""Collectives that are a part of an all-reduce, its mean, and the all-to-all.

A direct reduce-scatter is the first round of the sharded parameter server, an all-gather its second
round; a broadcast is the second half of a tree. Rank r has shard r; after a reduce-scatter its
other shards have no meaning. In an all-to-all, every rank sends a different block to every other
rank: rank r begins with its row of p · p blocks and ends with its column. Source: Thakur,
Rabenseifner, Gropp 2005; Patarasuk and Yuan 2009 (ring); Bruck et al. 1997, section 3 (the direct
exchange).
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from firecaffe.exchange import (
    find_schedule,
    parameter_server,
    ring,
    sharded_parameter_server,
    tree,
)
from firecaffe.exchange.schedule import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    AVERAGE,
    BROADCAST,
    REDUCE_SCATTER,
    OwnRound,
    Schedule,
    Transfer,
    shard,
)

MakeSchedule = Callable[[int, int], Schedule]


def half(make: MakeSchedule, kind: str) -> MakeSchedule:
    """Keep an all-reduce's rounds that add, for a reduce-scatter; else those that overwrite."""

    def schedule(world_size: int, num_elements: int) -> Schedule:
        whole, adds = make(world_size, num_elements), kind == REDUCE_SCATTER
        return whole.only(
            lambda _, t: t.reduce == adds,
            kind=kind,
            num_messages=whole.num_messages // 2,
            sent_elements=whole.sent_elements // 2,
            in_tree_order=not adds or whole.in_tree_order,
        )

    return schedule


def average(make: MakeSchedule) -> MakeSchedule:
    """Make an all-reduce after which every rank divides the total by the number of ranks."""

    def schedule(world_size: int, num_elements: int) -> Schedule:
        return replace(make(world_size, num_elements), kind=AVERAGE)

    return schedule


def all_to_all(world_size: int, num_elements: int) -> Schedule:
    p, n = world_size, num_elements
    stays = sum(stop - start for rank in range(p) for start, stop in [block(n, p, rank, rank)])
    return Schedule(
        "direct",
        p,
        n,
        partial(_direct_rounds, p, n),
        num_rounds=1,
        num_messages=(p - 1) * p,
        sent_elements=n - stays,
        in_tree_order=True,  # nothing is added
        kind=ALL_TO_ALL,
    )


def block(num_elements: int, world_size: int, source: int, destination: int) -> tuple[int, int]:
    """Return the elements of the vector that rank `source` has for rank `destination`."""
    return shard(num_elements, world_size * world_size, source * world_size + destination)


def _direct_rounds(p: int, n: int, rank: int) -> Iterator[OwnRound]:
    pairs = sharded_parameter_server.with_all_others(p, rank)
    yield 0, [Transfer(a, b, *block(n, p, a, b), reduce=False) for a, b in pairs]


COLLECTIVES: dict[str, dict[str, MakeSchedule]] = {
    REDUCE_SCATTER: {
        "sharded_parameter_server": half(sharded_parameter_server.schedule, REDUCE_SCATTER),
        "ring": half(partial(ring.schedule, first=-1), REDUCE_SCATTER),
    },
    ALL_GATHER: {
        "sharded_parameter_server": half(sharded_parameter_server.schedule, ALL_GATHER),
        "ring": half(partial(ring.schedule, first=-1), ALL_GATHER),
    },
    BROADCAST: {
        "parameter_server": half(parameter_server.schedule, BROADCAST),
        "tree": half(tree.schedule, BROADCAST),
    },
    ALL_TO_ALL: {"direct": all_to_all},
}
"""The collectives by kind, and by the all-reduce of which they are a part."""


def find_collective(kind: str, name: str, ranks_per_node: int = 1) -> MakeSchedule:
    """Return the algorithm of a kind. Raises: ValueError if there is none, as `find_schedule`."""
    if kind in (ALL_REDUCE, AVERAGE):
        make = find_schedule(name, ranks_per_node)
        return make if kind == ALL_REDUCE else average(make)
    if kind not in COLLECTIVES:
        kinds = ", ".join((ALL_REDUCE, AVERAGE, *COLLECTIVES))
        raise ValueError(f"no kind of collective {kind!r}; there are {kinds}")
    if name not in COLLECTIVES[kind]:
        raise ValueError(f"no {kind} {name!r}; there are {', '.join(COLLECTIVES[kind])}")
    return COLLECTIVES[kind][name]
