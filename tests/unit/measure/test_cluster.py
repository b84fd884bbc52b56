"""A cluster: the turns in which links are measured, what stands out, and what is written."""

from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from firecaffe.measure.cluster_findings import (
    MeasuredCluster,
    cluster_of,
    findings,
    slower,
    within_peak,
)
from firecaffe.measure.ranks_and_links import PairLink, RankFacts, tournament
from firecaffe.models import ModelConfig
from firecaffe.planner.cluster import Link, load_cluster
from firecaffe.planner.price import Prices
from firecaffe.planner.recipe_workload import workload_of_model
from firecaffe.planner.simulate import Network
from firecaffe.planner.step_cost import StepCost


@pytest.mark.parametrize("players", range(8))
def test_every_two_meet_once_and_nobody_twice_in_a_turn(players: int) -> None:
    turns = tournament(range(players))
    assert sorted(pair for turn in turns for pair in turn) == [*combinations(range(players), 2)]
    for turn in turns:
        seen = [player for pair in turn for player in pair]
        assert len(seen) == len(set(seen))
    assert len(turns) <= max(0, players)


def rank(number: int, **words: object) -> RankFacts:
    rng = np.random.default_rng(number)
    facts = {
        "rank": number, "host": f"host{number}", "group": "", "versions": "python 3.11",
        "device": "cpu", "memory_bytes": 100, "free_memory_bytes": 50, "free_disk_bytes": 50,
        "clock_s": 0.0, "clock_error_s": 0.001, "copy_bytes_per_s": (1e10,) * 7,
        "matrix_flops": tuple(1e11 * (1 + 0.01 * rng.standard_normal(7))),
        "file_write_bytes_per_s": 1e8, "file_read_bytes_per_s": 1e8, "name_lookup_s": 0.0,
    }  # fmt: skip
    return RankFacts(**{**facts, **words})  # type: ignore[arg-type]


FOUR = [rank(number) for number in range(4)]


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


def cluster(
    ranks: list[RankFacts], joined: list[PairLink], times: Any = None, **words: Any
) -> MeasuredCluster:
    return MeasuredCluster(ranks, joined, 1, [], times or {}, 0.0, **words)


def link_of(measured: MeasuredCluster) -> Link:
    return cluster_of(measured, None, "").links[0]


def test_the_rate_of_memory_is_in_the_file_if_ranks_share_it() -> None:
    ranks = [rank(i, host="a") for i in range(2)]
    inside = [replace(link, in_host=True) for link in links(2)]
    times = {"tree": {1_000_000: 4e-4}}
    shared, other = (
        link_of(MeasuredCluster(ranks, inside, 2, [[], []], times, 0.0, shares))
        for shares in (True, False)
    )
    assert (shared.memory_bytes_per_s, other.memory_bytes_per_s) == (1e10, 0.0)
    # 2 MB read and written at 10 GB/s, for 0.4 ms that were measured
    assert shared.efficiency["tree"] == pytest.approx(0.5, rel=1e-3)


def test_a_small_exchange_tells_how_long_a_message_takes_and_a_large_one_the_rest() -> None:
    """Four ranks: the tree is four messages one after the other, the ring six, and each takes a
    millisecond. With 2 MB the tree takes half as long again as by its messages and bytes.
    """
    small, large = 4096, 2_000_000
    at_once = {"tree": {small: 4e-3}, "ring": {small: 6e-3}, "native": {small: 1.0}}
    link = link_of(cluster(FOUR, links(4), at_once))
    of_bytes_s = (small + small / 4) / 2 / 2e7  # the ring sends quarters
    assert link.latency_s == pytest.approx(1e-3 - of_bytes_s, rel=0.01)
    by_bytes_s = Prices("tree", Network((link,), 4)).seconds([large // 4])[0]
    by_bytes_s *= link.efficiency["tree"]
    times = {"tree": {small: 4e-3, large: 1.5 * by_bytes_s}, "ring": {small: 6e-3}}
    link = link_of(cluster(FOUR, links(4), times))
    assert link.efficiency["tree"] == pytest.approx(1 / 1.5, rel=0.01)
    idle = {"tree": {small: 1e-9}}  # no message is faster than a round trip was
    assert link_of(cluster(FOUR, links(4), idle)).latency_s == links(4)[0].latency_s


@pytest.mark.parametrize("codec", ["one_bit", "int8"])
def test_a_codec_that_was_measured_takes_as_long_in_a_forecast(codec: str) -> None:
    """A step of four micro-batches has a node of each of four ranks, as the measured sums have."""
    work = workload_of_model(ModelConfig("lenet"), (1, 28, 28), 64, 16)
    size = work.parameter_bytes
    # What a codec travels by was slower than its links, which counts once.
    by = {name: {4096: 6e-3, size: 0.4} for name in ("ring", "sharded_parameter_server")}
    times = {codec: {4096: 1e-3, size: 0.7}, **by}
    measured = cluster_of(cluster(FOUR, links(4), times), None, "")
    one_bucket = replace(work, bucket_bytes=10**9)
    taken_s = StepCost(one_bucket, measured, "tree", codec).step(4).exchange_s
    assert taken_s == pytest.approx(0.7, rel=0.05)


HALF = tuple(0.5 * flops for flops in rank(9).matrix_flops)
STANDS_OUT: dict[str, tuple[list[RankFacts], list[PairLink], list[str]]] = {
    "nothing": (FOUR, links(4), []),
    "a name server that does not answer": (
        [rank(0), rank(1, name_lookup_s=5.01)],
        links(2),
        ["name lookups: rank 1 on host1 waits 5.0 s"],
    ),
    "a slow rank and a slow link": (
        [*FOUR[:2], rank(2, matrix_flops=HALF), FOUR[3]],
        links(4, slow_rank=1),
        ["slow rank: 2 on host2 computes 50", "slow link: that of rank 1 on host1 has 2"],
    ),
    "versions": ([rank(0), rank(1, versions="python 3.12")], [], ["versions differ"]),
    "clocks": ([rank(0), rank(1, clock_s=5.0)], [], ["clock: rank 1"]),
    "memory": ([rank(0), rank(3, free_memory_bytes=5)], [], ["memory: rank 3 on host3"]),
}


@pytest.mark.parametrize(("ranks", "joined", "starts"), STANDS_OUT.values(), ids=STANDS_OUT)
def test_what_stands_out_is_named(
    ranks: list[RankFacts], joined: list[PairLink], starts: list[str]
) -> None:
    said = findings(cluster(ranks, joined))
    assert len(said) == len(starts)
    for line, start in zip(said, starts, strict=True):
        assert line.startswith(start)


def test_noise_is_not_named() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        rates = {i: tuple(1e9 * (1 + 0.05 * rng.standard_normal(7))) for i in range(4)}
        assert slower(rates) == {}


@pytest.mark.parametrize("busy", [0, 30])
def test_round_trips_that_waited_for_the_processors_do_not_make_the_latency(busy: int) -> None:
    trips = (1400e-6,) * busy + (41e-6,) * (50 - busy)
    link = PairLink(0, 1, trips, (1e8,), in_host=False)
    assert link.latency_s == 41e-6
    said = [line.partition(" has ")[0] for line in findings(cluster([], [link]))]
    assert said == (["latency varied: link 0 - 1"] if busy else [])


def test_an_efficiency_is_a_share_of_the_peak_and_the_rates_stay() -> None:
    device = load_cluster("cpu-host").device
    found = within_peak(replace(device, efficiency=1.25))
    assert found.efficiency == 1
    assert found.peak_flops["float32"] == 1.25 * device.peak_flops["float32"]
    assert found.memory_bytes_per_s == 1.25 * device.memory_bytes_per_s
    assert within_peak(device) == device
