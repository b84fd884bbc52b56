"""One exchange: nccl-tests' figures by hand, vectors whose sum is known, and what else went on."""

import dataclasses
from collections import namedtuple
from itertools import product
from pathlib import Path

import pytest
import torch

from firecaffe.exchange.route import find_route
from firecaffe.measure.exchange_times import Timing, conditions_since, read_counters
from firecaffe.measure.known_sum import checks_bits, difference, summand, true_sum


def timing(world_size: int, size_bytes: int, *samples_s: float) -> Timing:
    return Timing("ring", world_size, size_bytes, samples_s)


def test_bandwidths_and_times() -> None:
    # Source: nccl-tests, doc/PERFORMANCE.md: S / t, and S / t · 2 (n - 1) / n.
    for world_size, size_bytes, time_s, *gb_per_s in (
        (2, 1_000_000_000, 0.5, 2.0, 2.0),
        (4, 16_000_000, 0.002, 8.0, 12.0),
        (8, 128_000_000, 0.016, 8.0, 14.0),
        (3, 3_000, 1e-6, 3.0, 4.0),
    ):
        row = timing(world_size, size_bytes, time_s)
        rates = row.algbw_bytes_per_s / 1e9, row.busbw_bytes_per_s / 1e9
        assert rates == pytest.approx(tuple(gb_per_s))
    for *samples_s, median_s in ((3.0, 3.0), (9.0, 1.0, 2.0, 2.0), (4.0, 1.0, 2.0, 9.0, 3.0)):
        assert timing(2, 8, *samples_s).time_s == median_s
    # 4 ranks, 1 Gbit/s links, 27 MB: at least 1.5 · 27e6 / 125e6 s = 0.324 s.
    for time_s, share in ((0.324, 1), (0.648, 0.5)):
        assert timing(4, 27_000_000, time_s).share_of_bound(125e6) == pytest.approx(share)


def test_ratio_is_the_median_of_ratios_and_not_the_ratio_of_medians() -> None:
    own, control = timing(2, 8, 1.0, 20.0, 6.0), timing(2, 8, 2.0, 10.0, 8.0)
    assert own.ratio_to(control) == 0.75  # of 0.5, 2.0 and 0.75; 6 / 8 happens to be the same
    assert timing(2, 8, 1.0, 20.0, 9.0).ratio_to(control) == 1.125
    slow_start, slow_end = timing(2, 8, 8.0, 1.0, 2.0), timing(2, 8, 1.0, 2.0, 8.0)
    assert slow_start.ratio_to(slow_end) == 0.5  # both medians are 2


LONG = 70_000
"""Longer than the pattern's period."""


@pytest.mark.parametrize("world_size", [2, 3, 7, 16])
def test_true_sum_is_the_sum_in_integers(world_size: int) -> None:
    """A rank that is missing, or counted twice, shows."""
    for num_elements in (0, 1, 5, 1009, LONG):
        summands = [summand(rank, world_size, num_elements) for rank in range(world_size)]
        total = true_sum(world_size, num_elements)
        assert total.shape == (num_elements,)
        assert torch.equal(total.to(torch.int64), torch.stack(summands).to(torch.int64).sum(0))
        assert all(torch.equal(vector, vector.round()) for vector in summands)
        if num_elements == 1009:
            for missing, twice in product(summands, summands):
                assert not torch.any(total - missing == total)
                assert (twice is missing) == torch.equal(total - missing + twice, total)


def test_every_sum_of_some_ranks_is_exact_in_float32() -> None:
    world_size = 2193
    assert true_sum(world_size, LONG).max() < 2**24
    assert min(summand(rank, world_size, LONG).min() for rank in (0, 1, 2192)) >= 1


def test_difference_is_of_bits() -> None:
    zero = torch.tensor([1.0, 0.0, 2.0])
    assert difference(zero, zero.clone()) == ""
    assert difference(torch.tensor([1.0, -0.0, 5.0]), zero) == "element 1 of 3 is -0 instead of 0"
    assert "element 0 of 1 is nan instead of 1" in difference(
        torch.tensor([torch.nan]), torch.ones(1)
    )


def test_bits_are_checked_where_the_tree_is_kept_and_small() -> None:
    for exchange, ranks, size, checks in (
        ("tree", 4, 2**18, True),
        ("tree", 4, 2**18 + 1, False),
        ("ring", 4, 8, False),
        ("native", 3, 8, False),
    ):
        assert checks_bits(find_route(exchange, None, ranks), size) == checks


SNMP = """Ip: Forwarding DefaultTTL
Ip: 1 64
Tcp: RtoAlgorithm OutSegs RetransSegs InErrs
Tcp: 1 1000 {retransmitted} 0
"""


def test_what_went_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Congestion control, segments that were sent again, and shares of processor time."""
    (tmp_path / "net").mkdir()
    (tmp_path / "net/snmp").write_text(SNMP.format(retransmitted=7))
    (tmp_path / "sys/net/ipv4").mkdir(parents=True)
    (tmp_path / "sys/net/ipv4/tcp_congestion_control").write_text("reno\n")
    before = read_counters(tmp_path)
    assert before.retransmitted_segments == 7
    (tmp_path / "net/snmp").write_text(SNMP.format(retransmitted=19))
    seen = conditions_since(before, tmp_path)
    assert (seen.congestion_control, seen.retransmitted_segments) == ("reno", 12)
    after = dataclasses.replace(
        before,
        total_cpu_s=before.total_cpu_s + 10,
        busy_cpu_s=before.busy_cpu_s + 5,
        process_cpu_s=before.process_cpu_s + 2,
    )
    monkeypatch.setattr("firecaffe.measure.exchange_times.read_counters", lambda _: after)
    seen = conditions_since(before, tmp_path)
    assert (seen.cpu_busy_share, seen.process_cpu_share) == pytest.approx((0.5, 0.2))


def test_idle_is_who_waits_for_a_disk_and_a_guest_counts_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = namedtuple("times", "user nice system idle iowait irq softirq steal guest guest_nice")
    monkeypatch.setattr("psutil.cpu_times", lambda: times(30, 2, 10, 100, 20, 1, 4, 3, 5, 0))
    counters = read_counters()
    assert (counters.busy_cpu_s, counters.total_cpu_s) == (50, 170)


@pytest.mark.parametrize("text", [None, "", "Tcp: RtoAlgorithm\nTcp: 1\n"])
def test_what_the_system_does_not_tell_is_none(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "net").mkdir()
        (tmp_path / "net/snmp").write_text(text)
    before = read_counters(tmp_path)
    assert before.retransmitted_segments is None
    seen = conditions_since(before, tmp_path)
    assert (seen.congestion_control, seen.retransmitted_segments) == (None, None)
