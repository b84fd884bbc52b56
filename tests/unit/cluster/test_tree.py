"""The links of the watch, for any number of ranks on any hosts."""

from collections import deque
from collections.abc import Sequence, Set

import pytest

from firecaffe.cluster.links import Links, links_of, most_links

PLACED = {
    "one host": lambda size: ["a"] * size,
    "one each": lambda size: [f"h{rank}" for rank in range(size)],
    "eight on each": lambda size: [f"h{rank // 8}" for rank in range(size)],
    "in turn": lambda size: [f"h{rank % 3}" for rank in range(size)],
    "uneven": lambda size: [f"h{rank.bit_length()}" for rank in range(size)],
}


def links(hosts: Sequence[str], fan_out: int) -> list[Links]:
    return [links_of(rank, hosts, fan_out) for rank in range(len(hosts))]


def parts(of: Sequence[Links], without: Set[int]) -> list[set[int]]:
    """Ranks that still reach each other."""
    left, found = set(range(len(of))) - without, []
    while left:
        part, waiting = set(), deque([left.pop()])
        while waiting:
            rank = waiting.popleft()
            part.add(rank)
            near = set(of[rank].ranks) & left
            left -= near
            waiting += near
        found.append(part)
    return found


@pytest.mark.parametrize("fan_out", [2, 3])
@pytest.mark.parametrize("placed", PLACED)
@pytest.mark.parametrize("size", [*range(1, 10), 17, 40])
def test_every_news_reaches_every_rank(size: int, placed: str, fan_out: int) -> None:
    hosts = PLACED[placed](size)
    of = links(hosts, fan_out)
    for rank, each in enumerate(of):
        assert len(each.ranks) == len(set(each.ranks)) <= most_links(fan_out)
        assert rank not in each.ranks
        for other in each.ranks:
            assert rank in of[other].ranks
        for child in each.children:
            assert of[child].parent == rank
    # One tree: a parent for each but the first, and all in one part.
    assert [rank for rank, each in enumerate(of) if each.parent is None] == [0]
    assert len(parts(of, set())) == 1
    firsts = {hosts.index(host) for host in hosts}
    for lost in range(size):
        beside = parts(of, {lost})
        if lost in firsts:  # its host's other ranks are apart, and all are linked with it
            assert all(part & set(of[lost].ranks) for part in beside)
            assert len(beside) <= 2
        else:
            assert len(beside) <= 1
    for host in set(hosts):
        assert len(parts(of, {rank for rank in range(size) if hosts[rank] == host})) <= 1


def test_only_first_ranks_are_linked_with_other_hosts() -> None:
    hosts = PLACED["eight on each"](64)
    for rank, each in enumerate(links(hosts, 2)):
        beyond = [other for other in each.ranks if hosts[other] != hosts[rank]]
        assert bool(beyond) == (rank % 8 == 0)


def test_no_rank_has_more_links_where_there_are_more_ranks() -> None:
    for hosts in (PLACED["one each"](4096), PLACED["eight on each"](4096)):
        assert max(len(links_of(rank, hosts).ranks) for rank in (0, 1, 8, 16, 40, 4095)) <= 14
