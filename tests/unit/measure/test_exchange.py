"""Figures of one exchange, against nccl-tests' definitions worked out by hand."""

import pytest

from firecaffe.measure.exchange_times import Timing


def timing(world_size: int, size_bytes: int, *samples_s: float) -> Timing:
    return Timing("ring", world_size, size_bytes, samples_s)


@pytest.mark.parametrize(
    ("world_size", "size_bytes", "time_s", "algbw_gb_per_s", "busbw_gb_per_s"),
    [
        # Source: nccl-tests, doc/PERFORMANCE.md: S / t, and S / t · 2 (n - 1) / n.
        (2, 1_000_000_000, 0.5, 2.0, 2.0),
        (4, 16_000_000, 0.002, 8.0, 12.0),
        (8, 128_000_000, 0.016, 8.0, 14.0),
        (3, 3_000, 1e-6, 3.0, 4.0),
    ],
)
def test_bandwidths(
    world_size: int, size_bytes: int, time_s: float, algbw_gb_per_s: float, busbw_gb_per_s: float
) -> None:
    found = timing(world_size, size_bytes, time_s)
    assert found.algbw_bytes_per_s == pytest.approx(algbw_gb_per_s * 1e9)
    assert found.busbw_bytes_per_s == pytest.approx(busbw_gb_per_s * 1e9)


@pytest.mark.parametrize(
    ("samples_s", "median_s"), [((3.0,), 3.0), ((9.0, 1.0, 2.0), 2.0), ((4.0, 1.0, 2.0, 9.0), 3.0)]
)
def test_time_is_the_median(samples_s: tuple[float, ...], median_s: float) -> None:
    assert timing(2, 8, *samples_s).time_s == median_s


def test_ratio_is_the_median_of_ratios_and_not_the_ratio_of_medians() -> None:
    own, control = timing(2, 8, 1.0, 20.0, 6.0), timing(2, 8, 2.0, 10.0, 8.0)
    assert own.ratio_to(control) == 0.75  # of 0.5, 2.0 and 0.75; 6 / 8 happens to be the same
    assert timing(2, 8, 1.0, 20.0, 9.0).ratio_to(control) == 1.125
    slow_start, slow_end = timing(2, 8, 8.0, 1.0, 2.0), timing(2, 8, 1.0, 2.0, 8.0)
    assert slow_start.ratio_to(slow_end) == 0.5  # both medians are 2


def test_share_of_bound() -> None:
    # 4 ranks, 1 Gbit/s links, 27 MB: at least 1.5 · 27e6 / 125e6 s = 0.324 s.
    assert timing(4, 27_000_000, 0.324).share_of_bound(125e6) == pytest.approx(1)
    assert timing(4, 27_000_000, 0.648).share_of_bound(125e6) == pytest.approx(0.5)
