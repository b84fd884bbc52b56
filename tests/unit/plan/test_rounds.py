"""Like rounds against the schedule that is executed; closed formulas against both."""

from math import ceil, log2

import pytest

from firecaffe.exchange import ALGORITHMS, find_schedule, fold
from firecaffe.exchange.leaves import equal_shares
from firecaffe.plan.cluster import Link
from firecaffe.plan.network import Network
from firecaffe.plan.price import Prices, rounds_only_s
from firecaffe.plan.round_prices import ROUNDS, like_rounds, rounds_of, rounds_s, sharded_s
from firecaffe.plan.simulate import simulate_s

LATENCY_S, RATE = 1e-4, 1e8
FLAT = (Link("net", LATENCY_S, RATE, congestion=0.1, addition_s_per_byte=1e-10),)
NODES = (
    Link("in the node", 1e-5, 1e9, group=4),
    Link("two networks", LATENCY_S, RATE, group=16, ports=2),
    Link("between racks", 2e-4, RATE, ports=1),
)
SIZES = (0, 1, 1000, 400_003)
RANKS = (*range(1, 18), 24, 31, 33, 48)


def test_there_are_like_rounds_of_every_exchange() -> None:
    assert list(ROUNDS) == list(ALGORITHMS)


@pytest.mark.parametrize("links", [FLAT, NODES], ids=["flat", "nodes"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_like_rounds_take_what_the_schedule_takes(algorithm: str, links: tuple[Link, ...]) -> None:
    for ranks in RANKS:
        network = Network(links, ranks)
        for size in SIZES:
            schedule = ALGORITHMS[algorithm](ranks, size)
            exact_s = rounds_s(rounds_of(schedule), network)
            like_s = rounds_s(like_rounds(algorithm, ranks, size), network)
            if size < ranks:  # a schedule leaves out what is empty
                continue
            # Slices differ by an element; a class of like rounds has the longest.
            longest_s = 64 * 4 / RATE * len(schedule.rounds)
            assert exact_s * (1 - 1e-9) <= like_s <= exact_s + longest_s, (ranks, size)


@pytest.mark.parametrize("name", ["hierarchical(tree,ring)", "hierarchical(parameter_server,tree)"])
def test_like_rounds_of_a_hierarchical_exchange(name: str) -> None:
    for ranks in (4, 8, 16, 48):
        network = Network(NODES, ranks)
        exact_s = rounds_s(rounds_of(find_schedule(name, 4)(ranks, 4800)), network)
        assert rounds_s(like_rounds(name, ranks, 4800, 4), network) == pytest.approx(exact_s)


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
        assert rounds_s(like_rounds(algorithm, ranks, size), network) == pytest.approx(seconds)
        # Where every rank has one message at a time, nothing overlaps, and nothing shares a port.
        if algorithm in ("ring", "recursive_doubling", "halving_doubling"):
            alone_s = simulate_s(ALGORITHMS[algorithm], network, size, in_pieces=False)
            assert alone_s == pytest.approx(seconds)


@pytest.mark.parametrize("ranks", [2, 3, 8, 16])
def test_a_server_hides_latencies_behind_bytes_and_bytes_behind_latencies(ranks: int) -> None:
    """Its messages overlap: many cost their bytes, empty ones the formula's latencies."""
    network = Network((Link("net", LATENCY_S, RATE),), ranks)
    server = ALGORITHMS["parameter_server"]
    few_s = simulate_s(server, network, 1, in_pieces=False)
    assert few_s == pytest.approx(2 * (ranks - 1) * LATENCY_S, rel=1e-3)
    many_s = simulate_s(server, network, 10_000_000, in_pieces=False)
    assert many_s == pytest.approx(2 * (ranks - 1) * 0.4 + 2 * LATENCY_S, rel=1e-6)


@pytest.mark.parametrize("ranks", [4, 8, 16, 32, 64])
def test_the_sharded_servers_formula(ranks: int) -> None:
    for links in (FLAT, NODES) if ranks >= NODES[1].group else (FLAT,):
        network = Network(links, ranks)
        listed_s = rounds_s(like_rounds("sharded_parameter_server", ranks, 6400), network)
        assert network.fills_groups
        assert sharded_s(network, 6400) == pytest.approx(listed_s, rel=1e-9)


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


def test_groups_that_are_not_full_have_their_messages_listed() -> None:
    network = Network(NODES, 7)
    listed_s = rounds_s(like_rounds("sharded_parameter_server", 7, 6400), network)
    assert not network.fills_groups
    assert rounds_only_s("sharded_parameter_server", network, 6400) == listed_s
    assert sharded_s(network, 6400) != pytest.approx(listed_s, rel=1e-3)


def test_pieces_overlap_the_rounds_of_a_server() -> None:
    """Four pieces through two rounds: the second begins when a quarter of the first is there."""
    network = Network((Link("net", 0.0, RATE),), 5)
    size = 1_000_000
    whole_s = 4 * size * 4 / RATE
    assert simulate_s(ALGORITHMS["parameter_server"], network, size) == pytest.approx(
        1.25 * whole_s
    )


def test_who_shares_a_port_takes_turns() -> None:
    """Two nodes of two ranks with one port each: a ring crosses twice, a swap of all four times."""
    one = Network((Link("node", 0.0, 1e15, group=2), Link("net", 0.0, RATE)), 4)
    size = 4000
    crossing_s = size * 4 / RATE
    doubling_s = simulate_s(ALGORITHMS["recursive_doubling"], one, size, in_pieces=False)
    assert doubling_s == pytest.approx(2 * crossing_s, rel=1e-3)
    two = Network((Link("node", 0.0, 1e15, group=2), Link("net", 0.0, RATE, ports=2)), 4)
    doubling_s = simulate_s(ALGORITHMS["recursive_doubling"], two, size, in_pieces=False)
    assert doubling_s == pytest.approx(crossing_s, rel=1e-3)
