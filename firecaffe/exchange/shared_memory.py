"""Sums in shared memory: ranks of one host add there, and only one rank of a host sends.

Hosts have m consecutive ranks each. In round 0, rank r of a host adds shard r of its ranks'
vectors, in memory. In round 1 it hands the sum on, in memory: to all if there is one host, else to
the first rank. Then the first ranks run any exchange (`outer`) with messages. In the last round
they hand the total to the others, in memory. Additions are in tree order on one host, and on
several if m is a power of two and `outer` adds in tree order. Source: Li et al., OSDI 2014
(shards); Goyal et al. 2017, section 4.1 (sums in each server first).
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from firecaffe.exchange import sharded_parameter_server
from firecaffe.exchange.hierarchical import among
from firecaffe.exchange.schedule import OwnRound, Schedule, Transfer

LINE_ELEMENTS = 16
"""Shards are multiples of this number of elements, so that owners share no cache line."""

ADDS, HANDS_ON = 0, 1
"""The rounds within a host before the first message."""


def schedule(
    world_size: int,
    num_elements: int,
    *,
    outer: Callable[[int, int], Schedule],
    ranks_per_host: int,
) -> Schedule:
    """Combine memory with `outer`, unused on one host. Raises: ValueError for partial hosts."""
    m = ranks_per_host
    if m < 1 or world_size % m:
        raise ValueError(f"{world_size} ranks do not fill hosts of {m}")
    hosts = world_size // m
    inside = sharded_parameter_server.schedule(m, num_elements, grain=LINE_ELEMENTS)
    across = outer(hosts, num_elements) if hosts > 1 else None
    return Schedule(
        "shared_memory" if across is None else f"shared_memory({across.algorithm})",
        world_size,
        num_elements,
        partial(_rounds, inside, across),
        num_rounds=2 if across is None else across.num_rounds + 3,
        num_messages=0 if across is None else across.num_messages,
        sent_elements=0 if across is None else across.sent_elements,
        in_tree_order=across is None or (m & (m - 1) == 0 and across.in_tree_order),
        ranks_per_memory=m,
    )


def _rounds(inside: Schedule, across: Schedule | None, rank: int) -> Iterator[OwnRound]:
    m = inside.world_size
    host, place = divmod(rank, m)
    first = m * host
    for number, transfers in inside.rounds_of(place):
        goes_on = number == ADDS or across is None
        kept = [t for t in transfers if goes_on or t.destination == 0]
        yield number, among(first, 1, kept)
    if across is None:
        return
    if place == 0:
        for number, transfers in across.rounds_of(host):
            yield HANDS_ON + 1 + number, among(0, m, transfers)
    others = range(first + 1, first + m) if place == 0 else [rank]
    last = [Transfer(first, other, 0, inside.num_elements, reduce=False) for other in others]
    yield HANDS_ON + 1 + across.num_rounds, last


class MemoryPart(NamedTuple):
    adds: list[tuple[int, int]]
    """Slices that this rank adds up, over all vectors of its host."""
    into: list[int]
    """Ranks whose vectors get these sums; this rank's only if no later total replaces it."""
    reads: int | None
    """The rank whose vector this rank copies in the last round, if messages come before it."""


def memory_part(whole: Schedule, rank: int) -> MemoryPart:
    """Return a rank's work in memory: it adds a slice and hands it on while it is in the cache."""
    adds, into, reads = [], {rank}, None
    for number, transfers in whole.rounds_of(rank):
        through_memory = [t for t in transfers if whole.in_memory(t)]
        if number == ADDS:
            adds = sorted({(t.start, t.stop) for t in through_memory if t.destination == rank})
        elif number == HANDS_ON:
            into |= {t.destination for t in through_memory if t.source == rank}
        elif through_memory and through_memory[0].destination == rank:
            reads = through_memory[0].source
            into.remove(rank)
    return MemoryPart(adds, sorted(into), reads)
