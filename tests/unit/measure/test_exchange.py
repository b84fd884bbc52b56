"""One exchange: nccl-tests' figures by hand, and vectors whose sum is known."""

import pytest
import torch

from firecaffe.exchange.route import find_route
from firecaffe.measure.exchange_times import Timing
from firecaffe.measure.known_sum import checks_bits, difference, summand, true_sum


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


LONG = 70_000
"""Longer than the pattern's period."""


def test_true_sum_is_the_sum_in_integers() -> None:
    for world_size in [2, 3, 7, 16]:
        for num_elements in [0, 1, 5, 1009, LONG]:
            summands = [summand(rank, world_size, num_elements) for rank in range(world_size)]
            expected = torch.stack(summands).to(torch.int64).sum(0)
            assert true_sum(world_size, num_elements).shape == (num_elements,)
            assert torch.equal(true_sum(world_size, num_elements).to(torch.int64), expected)
            assert all(torch.equal(vector, vector.round()) for vector in summands)


def test_every_sum_of_some_ranks_is_exact_in_float32() -> None:
    world_size = 2193
    assert true_sum(world_size, LONG).max() < 2**24
    assert min(summand(rank, world_size, LONG).min() for rank in (0, 1, 2192)) >= 1


def test_a_rank_that_is_missing_or_counted_twice_shows() -> None:
    for world_size in [2, 3, 4, 8]:
        vectors = [summand(rank, world_size, 1009) for rank in range(world_size)]
        right = true_sum(world_size, 1009)
        for missing in range(world_size):
            assert not torch.any(right - vectors[missing] == right)
            for twice in range(world_size):
                wrong = right - vectors[missing] + vectors[twice]
                assert (twice == missing) == torch.equal(wrong, right)


def test_difference_is_of_bits() -> None:
    zero = torch.tensor([1.0, 0.0, 2.0])
    assert difference(zero, zero.clone()) == ""
    assert difference(torch.tensor([1.0, -0.0, 5.0]), zero) == "element 1 of 3 is -0 instead of 0"
    assert "element 0 of 1 is nan instead of 1" in difference(
        torch.tensor([torch.nan]), torch.ones(1)
    )


def test_bits_are_checked_where_the_tree_is_kept_and_small() -> None:
    assert checks_bits(find_route("tree", None, 4), 2**18)
    assert not checks_bits(find_route("tree", None, 4), 2**18 + 1)
    assert not checks_bits(find_route("ring", None, 4), 8)
    assert not checks_bits(find_route("native", None, 3), 8)
