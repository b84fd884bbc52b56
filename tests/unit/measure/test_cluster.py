"""A cluster: the turns in which links are measured, what stands out, and what is written."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from firecaffe.measure.device import within_peak
from firecaffe.measure.found_cluster import MeasuredCluster, cluster_of, findings, slower
from firecaffe.measure.ranks_and_links import PairLink, RankFacts, tournament
from firecaffe.planner.cluster import load_cluster


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


def test_nothing_stands_out_where_all_is_well() -> None:
    assert findings(MeasuredCluster([rank(i) for i in range(4)], links(4), 1, [], {}, 0.0)) == []


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
