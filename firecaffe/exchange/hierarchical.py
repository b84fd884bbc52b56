"""Hierarchical: sums meet inside each node first, and only one rank of a node goes outside.

Ranks are in nodes of m consecutive ranks. The way up of a rooted exchange (`inner`) brings the
sum of a node to its first rank, in all nodes at once; the first ranks run any exchange
(`outer`) among them; the way down of `inner` hands the total to the others. The costs are those
of `inner` for m ranks and of `outer` for p / m ranks, one after the other; between nodes there
are the bytes of `outer` alone. In tree order where m is a power of two and both are.

Source: Goyal et al. 2017, section 4.1: sums in each server, an exchange across, a broadcast.
"""

from collections.abc import Callable, Sequence

from firecaffe.exchange.schedule import Round, Schedule, Transfer, make_schedule


def schedule(
    world_size: int,
    num_elements: int,
    *,
    inner: Callable[[int, int], Schedule],
    outer: Callable[[int, int], Schedule],
    ranks_per_node: int,
) -> Schedule:
    """`inner` is one of `ROOTED`, `outer` any row of `ALGORITHMS`; `find_schedule` sees to it.

    Raises: ValueError where the ranks do not fill whole nodes.
    """
    if ranks_per_node < 1 or world_size % ranks_per_node:
        raise ValueError(
            f"{world_size} ranks do not fill nodes of {ranks_per_node}; "
            "the number of ranks must be a multiple of ranks_per_node"
        )
    first_ranks = range(0, world_size, ranks_per_node)
    nodes = [range(first, first + ranks_per_node) for first in first_ranks]
    inside = inner(ranks_per_node, num_elements)
    across = outer(len(nodes), num_elements)
    # The rounds of a rooted exchange either add, and bring sums to the root, or overwrite.
    up = [round_ for round_ in inside.rounds if round_[0].reduce]
    down = [round_ for round_ in inside.rounds if not round_[0].reduce]
    rounds = [
        *([t for node in nodes for t in _among(node, round_)] for round_ in up),
        *(_among(first_ranks, round_) for round_ in across.rounds),
        *([t for node in nodes for t in _among(node, round_)] for round_ in down),
    ]
    name = f"hierarchical({inside.algorithm},{across.algorithm})"
    return make_schedule(name, world_size, num_elements, rounds)


def _among(ranks: Sequence[int], round_: Round) -> list[Transfer]:
    """The round with `ranks` in place of ranks 0, 1, …"""
    return [
        Transfer(ranks[t.source], ranks[t.destination], t.start, t.stop, t.reduce) for t in round_
    ]
