"""Like rounds against the schedule that is executed; closed formulas against both; ports that
connections share, against what fair shares and full ports give.
"""

from itertools import product
from math import ceil, log2

import pytest

from firecaffe.exchange import ALGORITHMS, find_schedule, fold
from firecaffe.exchange.leaves import equal_shares
from firecaffe.planner import price
from firecaffe.planner.cluster import Link
from firecaffe.planner.offers import offers
from firecaffe.planner.price import Prices, rounds_only_s
from firecaffe.planner.round_prices import ROUNDS, equal_rounds, rounds_of, rounds_s, sharded_s
from firecaffe.planner.simulate import (
    BLOCK_BYTES,
    LONG_BLOCKS,
    EventClock,
    Network,
    Ports,
    crowding,
    simulate_s,
)

LATENCY_S, RATE = 1e-4, 1e8
FLAT = (Link("net", LATENCY_S, RATE, congestion=0.1, addition_s_per_byte=1e-10),)
NODES = (
    Link("in the node", 1e-5, 1e9, group=4),
    Link("two networks", LATENCY_S, RATE, group=16, ports=2),
    Link("between racks", 2e-4, RATE, ports=1),
)
SIZES = (0, 1, 1000, 400_003)
RANKS = (*range(1, 9), 12, 13, 16, 17, 24, 31, 33, 48)


@pytest.mark.parametrize("links", [FLAT, NODES], ids=["flat", "nodes"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_like_rounds_take_what_the_schedule_takes(algorithm: str, links: tuple[Link, ...]) -> None:
    assert list(ROUNDS) == list(ALGORITHMS)
    for ranks, size in product(RANKS, SIZES):
        network = Network(links, ranks)
        schedule = ALGORITHMS[algorithm](ranks, size)
        exact_s = rounds_s(rounds_of(schedule), network)
        like_s = rounds_s(equal_rounds(algorithm, ranks, size), network)
        # Slices differ by an element; a class of like rounds has the longest.
        longest_s = 64 * 4 / RATE * len(schedule.rounds)
        if size >= ranks:  # a schedule leaves out what is empty
            assert exact_s * (1 - 1e-9) <= like_s <= exact_s + longest_s, (ranks, size)


@pytest.mark.parametrize("name", ["hierarchical(tree,ring)", "hierarchical(parameter_server,tree)"])
def test_like_rounds_of_a_hierarchical_exchange(name: str) -> None:
    for ranks in (4, 8, 16, 48):
        network = Network(NODES, ranks)
        exact_s = rounds_s(rounds_of(find_schedule(name, 4)(ranks, 4800)), network)
        assert rounds_s(equal_rounds(name, ranks, 4800, 4), network) == pytest.approx(exact_s)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 13, 16])
def test_rounds_take_the_published_formulas(ranks: int) -> None:
    """Thakur, Rabenseifner and Gropp 2005, on ports without congestion or additions."""
    size = 16 * 3 * 13 * 5 * 1000
    alpha, beta = LATENCY_S, 4 / RATE
    levels = ceil(log2(ranks))
    expected = {
        "parameter_server": 2 * (ranks - 1) * (alpha + size * beta),
        "sharded_parameter_server": 2 * (ranks - 1) * (alpha + size * beta / ranks),
        "tree": 2 * levels * (alpha + size * beta),
        "ring": 2 * (ranks - 1) * (alpha + size * beta / ranks),
    }
    if ranks & (ranks - 1) == 0:
        shares = 2 * (ranks - 1) / ranks
        expected["recursive_doubling"] = levels * (alpha + size * beta)
        expected["halving_doubling"] = 2 * levels * alpha + shares * size * beta
    network = Network((Link("net", LATENCY_S, RATE),), ranks)
    for algorithm, seconds in expected.items():
        assert rounds_s(equal_rounds(algorithm, ranks, size), network) == pytest.approx(seconds)
        # Where every rank has one message at a time, nothing overlaps, and nothing shares a port.
        if algorithm in ("ring", "recursive_doubling", "halving_doubling"):
            alone_s = simulate_s(ALGORITHMS[algorithm], network, size, in_pieces=False)
            assert alone_s == pytest.approx(seconds)


def test_a_server_hides_latencies_behind_bytes_and_bytes_behind_latencies() -> None:
    """Its messages overlap: many cost their bytes, empty ones the formula's latencies."""
    server = ALGORITHMS["parameter_server"]
    for ranks in (2, 3, 8, 16):
        network = Network((Link("net", LATENCY_S, RATE),), ranks)
        few_s = simulate_s(server, network, 1, in_pieces=False)
        assert few_s == pytest.approx(2 * (ranks - 1) * LATENCY_S, rel=1e-3)
        many_s = simulate_s(server, network, 10_000_000, in_pieces=False)
        assert many_s == pytest.approx(2 * (ranks - 1) * 0.4 + 2 * LATENCY_S, rel=1e-6)


def test_the_sharded_servers_formula_needs_full_groups() -> None:
    for ranks, links in [
        *((ranks, FLAT) for ranks in (4, 64)),
        (16, NODES),
        (64, NODES),
        (7, NODES),
    ]:
        network = Network(links, ranks)
        listed_s = rounds_s(equal_rounds("sharded_parameter_server", ranks, 6400), network)
        assert network.fills_groups == (ranks != 7)
        is_equal = sharded_s(network, 6400) == pytest.approx(listed_s, rel=1e-3)
        assert is_equal == network.fills_groups
        assert rounds_only_s("sharded_parameter_server", network, 6400) == pytest.approx(listed_s)


@pytest.mark.parametrize("per_node", [1, 8])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_more_bandwidth_is_never_slower_and_no_exchange_outruns_its_bytes(
    algorithm: str, per_node: int
) -> None:
    """The overlap of pieces is that of messages as long as those that are priced."""
    sizes = (100, 10_000, 300_000)
    clusters = offers("a100", (10, 100, 200, 400, 800), per_node)
    for ranks in (3, 12, 16, 64, 1024):
        before = [float("inf")] * len(sizes)
        for cluster in clusters:
            taken = Prices(algorithm, Network(cluster.links, ranks)).seconds(sizes)
            assert all(new <= old * (1 + 1e-9) for new, old in zip(taken, before, strict=True)), (
                cluster.name,
                ranks,
            )
            before = taken
            if per_node == 1:
                rate = cluster.links[0].bandwidth_bytes_per_s
                least = [2 * (ranks - 1) / ranks * 4 * size / rate for size in sizes]
                assert all(time_s >= at for time_s, at in zip(taken, least, strict=True))


@pytest.mark.parametrize("algorithm", ["tree", "pipelined_tree", "double_tree", "halving_doubling"])
def test_a_vector_beyond_what_is_priced_takes_as_long_as_its_bytes(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, network = 2**25, Network(FLAT, 4)
    monkeypatch.setattr(price, "MAX_SEGMENTED_ELEMENTS", size)
    exact_s = Prices(algorithm, network).seconds([size])
    monkeypatch.setattr(price, "MAX_SEGMENTED_ELEMENTS", 2**23)
    monkeypatch.setattr(price, "MAX_ELEMENTS", 2**23)
    prices = Prices(algorithm, network)
    assert prices.seconds([size]) == pytest.approx(exact_s, rel=0.01)
    once, twice = prices.seconds([2**41, 2**42])  # a simulation would not end
    assert twice == pytest.approx(2 * once, rel=0.01)
    assert prices.share_in_lanes(2**42, 2) == prices.share_in_lanes(2**23, 2)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_fold_is_priced_by_what_is_left_of_it_at_the_end(ranks: int) -> None:
    """One node of each rank one way, and the total the other: the others went early."""
    leaves = 3 * ranks  # two nodes of each rank's three leaves
    inputs = fold.inputs_of(leaves, equal_shares(leaves, ranks))
    assert {len(own) for own in inputs} == {2}
    network = Network(FLAT, ranks)
    prices = Prices("fold", network, num_leaves=leaves)
    server = ALGORITHMS["sharded_parameter_server"]
    server_s = simulate_s(server, network, 6400, in_pieces=False)
    assert prices.seconds([6400])[0] == pytest.approx(server_s)
    at_once = fold.schedule(inputs, leaves, 6400)
    assert server_s < simulate_s(lambda _, size: at_once, network, 6400, in_pieces=False)


def test_pieces_overlap_the_rounds_of_a_server_and_who_shares_a_port_takes_turns() -> None:
    """Four pieces through two rounds: the second begins when a quarter of the first is there. Two
    nodes of two ranks with one port each: a swap of all crosses four times.
    """
    network = Network((Link("net", 0.0, RATE),), 5)
    taken_s = simulate_s(ALGORITHMS["parameter_server"], network, 1_000_000)
    assert taken_s == pytest.approx(1.25 * 4 * 4e6 / RATE)
    for ports, crossings in ((1, 2), (2, 1)):
        links = Link("node", 0.0, 1e15, group=2), Link("net", 0.0, RATE, ports=ports)
        doubling = ALGORITHMS["recursive_doubling"]
        taken_s = simulate_s(doubling, Network(links, 4), 4000, in_pieces=False)
        assert taken_s == pytest.approx(crossings * 4000 * 4 / RATE, rel=1e-3)


LENGTH = 9_000_000
ALONE_S = LENGTH / RATE
BLOCK_S = ALONE_S / LONG_BLOCKS


def arrivals(
    messages: list[tuple[int, int, int]], links: tuple[Link, ...] = (Link("net", 0.0, RATE),)
) -> list[float]:
    """When messages (source, destination, bytes) that are all sent at once have arrived."""
    clock = EventClock()
    ports = Ports(Network(links, 8), clock)
    arrived: dict[int, float] = {}
    for number, (source, destination, num_bytes) in enumerate(messages):

        def note(number: int = number) -> None:
            arrived[number] = clock.now_s

        ports.send(source, destination, num_bytes, 1.0, note)
    clock.run()
    return [arrived[number] for number in range(len(messages))]


def test_messages_of_one_connection_follow_each_other_and_two_ways_are_at_once() -> None:
    for num_bytes in (0, 1, BLOCK_BYTES, BLOCK_BYTES + 1, LENGTH):
        assert arrivals([(0, 1, num_bytes)]) == [pytest.approx(num_bytes / RATE)]
    assert arrivals([(0, 1, LENGTH), (0, 1, LENGTH)]) == pytest.approx([ALONE_S, 2 * ALONE_S])
    assert arrivals([(0, 1, LENGTH), (1, 0, LENGTH)]) == pytest.approx([ALONE_S, ALONE_S])


@pytest.mark.parametrize("peers", [2, 3, 7])
@pytest.mark.parametrize("is_there", [True, False])
def test_a_port_with_several_is_full_and_none_is_there_sooner(peers: int, is_there: bool) -> None:
    """All go at one rate, so the first is there a block of each other before the last."""
    pairs = [(0, peer) if is_there else (peer, 0) for peer in range(1, peers + 1)]
    ends = arrivals([(*pair, LENGTH) for pair in pairs])
    assert max(ends) == pytest.approx(peers * ALONE_S)
    assert min(ends) >= peers * ALONE_S - (2 * peers - 1) * BLOCK_S


def test_who_waits_for_a_full_port_holds_nobody_up_behind_it() -> None:
    """Rank 0 sends to 1, to whom five others send, and to 2, to whom nobody does."""
    crowd = [(peer, 1, LENGTH) for peer in range(3, 8)]
    ends = arrivals([(0, 1, LENGTH), (0, 2, LENGTH), *crowd])
    assert ends[1] <= ALONE_S * (1 + 1 / 6) + 3 * BLOCK_S
    assert max(ends) == pytest.approx(6 * ALONE_S)


def test_ranks_of_a_node_share_its_port() -> None:
    for ports, to, factor in ((1, 4, 2), (2, 4, 1), (1, 1, 1)):
        links = (Link("node", 0.0, 1e12, group=4), Link("net", 0.0, RATE, ports=ports))
        other = (1, 5, LENGTH) if to == 4 else (0, 4, LENGTH)
        ends = arrivals([(0, to, LENGTH), other], links)
        assert max(ends) == pytest.approx(factor * ALONE_S)


def test_a_crowd_at_a_port_costs_what_was_observed() -> None:
    assert crowding(0.0, 7) == crowding(0.2, 1) == 1
    assert [crowding(0.14, k) for k in (3, 7, 15)] == pytest.approx([1.14, 1.28, 1.42])
