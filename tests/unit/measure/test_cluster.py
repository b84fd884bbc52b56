"""A cluster: the turns in which links are measured, what stands out, and what is written."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from firecaffe.measure.found_cluster import (
    MeasuredCluster,
    cluster_of,
    findings,
    slower,
    within_peak,
)
from firecaffe.measure.ranks_and_links import PairLink, RankFacts, tournament
from firecaffe.models.config import ModelConfig
from firecaffe.planner.cluster import load_cluster
from firecaffe.planner.of_recipe import workload_of_model
from firecaffe.planner.price import Prices
from firecaffe.planner.simulate import Network
from firecaffe.planner.step_cost import StepCost


@pytest.mark.parametrize("players", range(8))
def test_every_two_meet_once_and_nobody_twice_in_a_turn(players: int) -> None:
    turns = tournament(range(players))
    met = [pair for turn in turns for pair in turn]
    assert sorted(met) == sorted(combinations(range(players), 2))
    for turn in turns:
        seen = [player for pair in turn for player in pair]
        assert len(seen) == len(set(seen))
    assert len(turns) <= max(0, players)


def rank(number: int, **words: object) -> RankFacts:
    rng = np.random.default_rng(number)
    facts = {
        "rank": number,
        "host": f"host{number}",
        "group": "",
        "versions": "python 3.11",
        "device": "cpu",
        "memory_bytes": 100,
        "free_memory_bytes": 50,
        "free_disk_bytes": 50,
        "clock_s": 0.0,
        "clock_error_s": 0.001,
        "matrix_flops": tuple(1e11 * (1 + 0.01 * rng.standard_normal(7))),
        "copy_bytes_per_s": (1e10,) * 7,
        "file_write_bytes_per_s": 1e8,
        "file_read_bytes_per_s": 1e8,
        "name_lookup_s": 0.0,
    }
    return RankFacts(**{**facts, **words})  # type: ignore[arg-type]


def links(ranks: int, slow_rank: int | None = None) -> list[PairLink]:
    rng = np.random.default_rng(1)
    return [
        PairLink(
            a,
            b,
            (1e-5,) * 5,
            tuple((2e6 if slow_rank in (a, b) else 2e7) * (1 + 0.01 * rng.standard_normal(5))),
            in_host=False,
        )
        for a, b in combinations(range(ranks), 2)
    ]


def test_the_rate_of_memory_is_in_the_file_if_ranks_share_it() -> None:
    ranks = [rank(i, host="a") for i in range(2)]
    inside = [replace(each, in_host=True) for each in links(2)]
    times = {"tree": {1_000_000: 4e-4}}
    for shares, rate in ((True, 1e10), (False, 0.0)):
        found = cluster_of(
            MeasuredCluster(ranks, inside, 2, [[], []], times, 0.0, shares), None, ""
        )
        assert found.links[0].memory_bytes_per_s == rate
        if shares:  # 2 MB read and written at 10 GB/s, for 0.4 ms that were measured
            assert found.links[0].efficiency["tree"] == pytest.approx(0.5, rel=1e-3)


def test_a_small_exchange_tells_how_long_a_message_takes_and_a_large_one_the_rest() -> None:
    """Four ranks: the tree is four messages one after the other, the ring six, and each takes a
    millisecond. With 2 MB the tree takes half as long again as by its messages and bytes.
    """
    ranks, small, large = [rank(i) for i in range(4)], 4096, 2_000_000
    at_once = {"tree": {small: 4e-3}, "ring": {small: 6e-3}, "native": {small: 1.0}}
    found = cluster_of(MeasuredCluster(ranks, links(4), 1, [], at_once, 0.0), None, "")
    of_bytes_s = (small + small / 4) / 2 / 2e7  # the ring sends quarters
    assert found.links[0].latency_s == pytest.approx(1e-3 - of_bytes_s, rel=0.01)
    by_bytes_s = Prices("tree", Network(found.links, 4)).seconds([large // 4])[0]
    by_bytes_s *= found.links[0].efficiency["tree"]
    times = {"tree": {small: 4e-3, large: 1.5 * by_bytes_s}, "ring": {small: 6e-3}}
    found = cluster_of(MeasuredCluster(ranks, links(4), 1, [], times, 0.0), None, "")
    assert found.links[0].efficiency["tree"] == pytest.approx(1 / 1.5, rel=0.01)
    idle = {"tree": {small: 1e-9}}  # no message is faster than a round trip was
    found = cluster_of(MeasuredCluster(ranks, links(4), 1, [], idle, 0.0), None, "")
    assert found.links[0].latency_s == links(4)[0].latency_s


@pytest.mark.parametrize("codec", ["one_bit", "int8"])
def test_a_codec_that_was_measured_takes_as_long_in_a_forecast(codec: str) -> None:
    """A step of four micro-batches has a node of each of four ranks, as the measured sums have."""
    work = workload_of_model(ModelConfig("lenet"), (1, 28, 28), 64, 16)
    size = work.parameter_bytes
    # What a codec travels by was slower than its links, which counts once.
    by = {name: {4096: 6e-3, size: 0.4} for name in ("ring", "sharded_parameter_server")}
    times = {codec: {4096: 1e-3, size: 0.7}, **by}
    ranks = [rank(i) for i in range(4)]
    found = cluster_of(MeasuredCluster(ranks, links(4), 1, [], times, 0.0), None, "")
    one_bucket = replace(work, bucket_bytes=10**9)
    taken_s = StepCost(one_bucket, found, "tree", codec).step(4).exchange_s
    assert taken_s == pytest.approx(0.7, rel=0.05)


def test_nothing_stands_out_where_all_is_well() -> None:
    assert findings(MeasuredCluster([rank(i) for i in range(4)], links(4), 1, [], {}, 0.0)) == []


def test_a_name_server_that_does_not_answer_is_named() -> None:
    ranks = [rank(0), rank(1, name_lookup_s=5.01)]
    [said] = findings(MeasuredCluster(ranks, links(2), 1, [], {}, 0.0))
    assert said.startswith("name lookups: rank 1 on host1 waits 5.0 s")
    assert "RES_OPTIONS" in said


def test_a_slow_rank_and_a_slow_link_are_named() -> None:
    ranks = [rank(i) for i in range(4)]
    slow = rank(2, matrix_flops=tuple(0.5 * flops for flops in rank(9).matrix_flops))
    said = findings(
        MeasuredCluster([*ranks[:2], slow, ranks[3]], links(4, slow_rank=1), 1, [], {}, 0.0)
    )
    assert len(said) == 2
    assert said[0].startswith("slow rank: 2 on host2 computes 50")
    assert said[1].startswith("slow link: that of rank 1 on host1 has 2")


def test_versions_clocks_and_memory_are_told() -> None:
    ranks = [rank(0), rank(1, versions="python 3.12"), rank(2, clock_s=5.0)]
    ranks.append(rank(3, free_memory_bytes=5))
    said = " ".join(findings(MeasuredCluster(ranks, [], 1, [], {}, 0.0)))
    for words in ("versions differ", "clock: rank 2", "memory: rank 3 on host3"):
        assert words in said


def test_noise_is_not_named() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        rates = {i: tuple(1e9 * (1 + 0.05 * rng.standard_normal(7))) for i in range(4)}
        assert slower(rates) == {}


@pytest.mark.parametrize(("busy", "says"), [(0, False), (30, True)])
def test_round_trips_that_waited_for_the_processors_do_not_make_the_latency(
    busy: int, says: bool
) -> None:
    trips = (1400e-6,) * busy + (41e-6,) * (50 - busy)
    link = PairLink(0, 1, trips, (1e8,), in_host=False)
    assert link.latency_s == 41e-6
    said = findings(MeasuredCluster([], [link], 1, [], {}, 0.0))
    assert [line.startswith("latency varied: link 0 - 1 has 41 µs") for line in said] == [
        True
    ] * says


def test_an_efficiency_is_a_share_of_the_peak_and_the_rates_stay() -> None:
    device = load_cluster("cpu-host").device
    found = within_peak(replace(device, efficiency=1.25))
    assert found.efficiency == 1
    assert found.peak_flops["float32"] == 1.25 * device.peak_flops["float32"]
    assert found.memory_bytes_per_s == 1.25 * device.memory_bytes_per_s
    assert within_peak(device) == device
