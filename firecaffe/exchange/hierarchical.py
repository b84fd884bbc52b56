"""Hierarchical: ranks of a node add first, and only one rank of each node sends outside.

Nodes are m consecutive ranks. The way up of a rooted exchange (`inner`) brings a node's sum to its
first rank; the first ranks run any exchange (`outer`); the way down of `inner` hands the total on.
The cost is that of `inner` for m ranks plus that of `outer` for p / m, which alone sends between
nodes. Additions are in tree order if both are, and m is a power of two. Source: Goyal et al. 2017,
section 4.1: sums in each server, an exchange across, a broadcast.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from firecaffe.exchange.schedule import OwnRound, Schedule, Transfer


def schedule(
    world_size: int,
    num_elements: int,
    *,
    inner: Callable[[int, int], Schedule],
    outer: Callable[[int, int], Schedule],
    ranks_per_node: int,
) -> Schedule:
    """Combine a row of `ROOTED` and one of `ALGORITHMS`. Raises: ValueError for partial nodes."""
    m = ranks_per_node
    if m < 1 or world_size % m:
        raise ValueError(
            f"{world_size} ranks do not fill nodes of {m}; "
            "the number of ranks must be a multiple of ranks_per_node"
        )
    nodes = world_size // m
    inside, across = inner(m, num_elements), outer(nodes, num_elements)
    busiest = None
    if inside.busiest is not None and across.busiest is not None:
        busiest = [*inside.busiest, *(m * node for node in across.busiest)]
    return Schedule(
        f"hierarchical({inside.algorithm},{across.algorithm})",
        world_size,
        num_elements,
        partial(_rounds, inside, across),
        num_rounds=inside.num_rounds + across.num_rounds,
        num_messages=nodes * inside.num_messages + across.num_messages,
        sent_elements=nodes * inside.sent_elements + across.sent_elements,
        # A node of m ranks is a node of the tree only if m is a power of two.
        in_tree_order=inside.in_tree_order
        and (nodes == 1 or (m & (m - 1) == 0 and across.in_tree_order)),
        busiest=busiest,
    )


def _rounds(inside: Schedule, across: Schedule, rank: int) -> Iterator[OwnRound]:
    m = inside.world_size
    node, place = divmod(rank, m)
    within = [(number, among(m * node, 1, ts)) for number, ts in inside.rounds_of(place)]
    # One half of a rooted exchange's rounds add towards the root, the other half overwrite.
    yield from ((number, ts) for number, ts in within if ts[0].reduce)
    if place == 0:
        for number, ts in across.rounds_of(node):
            yield inside.num_rounds // 2 + number, among(0, m, ts)
    yield from ((across.num_rounds + number, ts) for number, ts in within if not ts[0].reduce)


def among(first: int, stride: int, transfers: Sequence[Transfer]) -> list[Transfer]:
    """Return the transfers with rank first + i · stride in place of rank i."""
    return [
        Transfer(first + t.source * stride, first + t.destination * stride, *t[2:])
        for t in transfers
    ]
