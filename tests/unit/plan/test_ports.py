"""Ports that connections share: against what fair shares and full ports give."""

import pytest

from firecaffe.plan.cluster import Link
from firecaffe.plan.network import Network
from firecaffe.plan.simulate import BLOCK_BYTES, LONG_BLOCKS, Clock, Ports, crowding

RATE = 1e8
LENGTH = 9_000_000
ALONE_S = LENGTH / RATE
BLOCK_S = ALONE_S / LONG_BLOCKS


def arrivals(
    messages: list[tuple[int, int, int]], links: tuple[Link, ...] = (Link("net", 0.0, RATE),)
) -> list[float]:
    """When messages (source, destination, bytes) that are all sent at once have arrived."""
    clock = Clock()
    ports = Ports(Network(links, 8), clock)
    arrived: dict[int, float] = {}
    for number, (source, destination, num_bytes) in enumerate(messages):

        def note(number: int = number) -> None:
            arrived[number] = clock.now_s

        ports.send(source, destination, num_bytes, 1.0, note)
    clock.run()
    return [arrived[number] for number in range(len(messages))]


@pytest.mark.parametrize("num_bytes", [0, 1, BLOCK_BYTES, BLOCK_BYTES + 1, LENGTH])
def test_a_message_alone_takes_its_bytes(num_bytes: int) -> None:
    assert arrivals([(0, 1, num_bytes)]) == [pytest.approx(num_bytes / RATE)]


def test_messages_of_one_connection_follow_each_other() -> None:
    assert arrivals([(0, 1, LENGTH), (0, 1, LENGTH)]) == pytest.approx([ALONE_S, 2 * ALONE_S])


@pytest.mark.parametrize("peers", [2, 3, 7])
def test_who_sends_to_several_has_none_there_sooner(peers: int) -> None:
    """All go at one rate, so the first is there a block of each other before the last."""
    ends = arrivals([(0, peer, LENGTH) for peer in range(1, peers + 1)])
    assert max(ends) == pytest.approx(peers * ALONE_S)
    assert min(ends) >= peers * ALONE_S - (2 * peers - 1) * BLOCK_S


@pytest.mark.parametrize("peers", [2, 3, 7])
def test_a_port_that_hears_from_several_is_full_all_the_time(peers: int) -> None:
    ends = arrivals([(peer, 0, LENGTH) for peer in range(1, peers + 1)])
    assert max(ends) == pytest.approx(peers * ALONE_S)
    assert min(ends) >= peers * ALONE_S - (2 * peers - 1) * BLOCK_S


def test_a_port_sends_and_receives_at_once() -> None:
    assert arrivals([(0, 1, LENGTH), (1, 0, LENGTH)]) == pytest.approx([ALONE_S, ALONE_S])


def test_who_waits_for_a_full_port_holds_nobody_up_behind_it() -> None:
    """Rank 0 sends to 1, to whom five others send, and to 2, to whom nobody does."""
    crowd = [(peer, 1, LENGTH) for peer in range(3, 8)]
    ends = arrivals([(0, 1, LENGTH), (0, 2, LENGTH), *crowd])
    assert ends[1] <= ALONE_S * (1 + 1 / 6) + 3 * BLOCK_S
    assert max(ends) == pytest.approx(6 * ALONE_S)


def test_ranks_of_a_node_share_its_port() -> None:
    nodes = (Link("node", 0.0, 1e12, group=4), Link("net", 0.0, RATE))
    assert max(arrivals([(0, 4, LENGTH), (1, 5, LENGTH)], nodes)) == pytest.approx(2 * ALONE_S)
    two = (nodes[0], Link("net", 0.0, RATE, ports=2))
    assert max(arrivals([(0, 4, LENGTH), (1, 5, LENGTH)], two)) == pytest.approx(ALONE_S)
    assert max(arrivals([(0, 1, LENGTH), (0, 4, LENGTH)], nodes)) == pytest.approx(ALONE_S)


def test_a_crowd_at_a_port_costs_what_was_observed() -> None:
    assert crowding(0.0, 7) == 1
    assert crowding(0.2, 1) == 1
    assert [crowding(0.14, k) for k in (3, 7, 15)] == pytest.approx([1.14, 1.28, 1.42])
