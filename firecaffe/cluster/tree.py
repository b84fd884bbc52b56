"""The links over which ranks watch over each other: few for each rank, however many there are.

The first rank of each host watches for its host. These first ranks form a tree, and so do the ranks
of one host below their first. In each of the two trees a rank also has a link to its grandparent,
and those right below the root have one to the next of them; so a rank of the tree may be gone, or
silent, and news still go round it. (Between a host and the others stands its first rank alone.
If that one is lost, each side sees it for itself.)

Where rank 0 goes on without ranks that are lost, losses add up: of two lost ranks one above the
other, all below them would be cut off. There, each rank has a link to rank 0, and no other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

FAN_OUT = 2
"""Children of a rank in a tree. Three would save two hops of nine at 512 hosts, for twice the
links."""


@dataclass(frozen=True)
class Links:
    """The ranks that a rank is linked with, each once."""

    parent: int | None = None
    children: tuple[int, ...] = ()
    beside: tuple[int, ...] = ()
    """The grandparent and grandchildren, or the others right below the root."""

    @property
    def ranks(self) -> list[int]:
        """All linked ranks, in rank order."""
        above = () if self.parent is None else (self.parent,)
        return sorted((*above, *self.children, *self.beside))


def links_of(rank: int, hosts: Sequence[str], fan_out: int = FAN_OUT) -> Links:
    """The links of one rank. hosts: the name of each rank's host, by rank."""
    by_host: dict[str, list[int]] = {}
    for each, host in enumerate(hosts):
        by_host.setdefault(host, []).append(each)
    own = by_host[hosts[rank]]
    below = _in_tree(own.index(rank), own, fan_out)
    if rank != own[0]:
        return below
    firsts = [ranks[0] for ranks in by_host.values()]
    among = _in_tree(firsts.index(rank), firsts, fan_out)
    return Links(among.parent, among.children + below.children, among.beside + below.beside)


def star_of(rank: int, hosts: Sequence[str]) -> Links:
    """The links of one rank where all are linked with rank 0 alone. Rank 0 has one to each, as many
    as the server of a training has to its workers anyway.
    """
    return Links(parent=0) if rank else Links(children=tuple(range(1, len(hosts))))


Shape = Callable[[int, Sequence[str]], Links]
"""(rank, hosts by rank) -> the rank's links: `links_of` or `star_of`."""


def most_links(fan_out: int = FAN_OUT) -> int:
    """The most links that a rank has: a parent, two beside it, children and grandchildren; in two
    trees, if it is the root of one.
    """
    below = fan_out + fan_out**2
    return 3 + below + below


def _in_tree(place: int, ranks: Sequence[int], fan_out: int) -> Links:
    """The links in a complete tree by levels, as a heap: i's children start at i * fan_out + 1."""

    def children(of: int) -> range:
        return range(min(len(ranks), of * fan_out + 1), min(len(ranks), (of + 1) * fan_out + 1))

    beside = [grandchild for child in children(place) for grandchild in children(child)]
    parent = (place - 1) // fan_out if place else None
    if parent:
        beside.append((parent - 1) // fan_out)
    elif parent == 0:
        level = children(0)
        beside += [each for each in (place - 1, place + 1) if each in level]
    return Links(
        None if parent is None else ranks[parent],
        tuple(ranks[each] for each in children(place)),
        tuple(ranks[each] for each in beside),
    )
