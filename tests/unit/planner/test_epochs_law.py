"""The law of epochs against batch: its closed form, its band, its range, and what bears no law."""

import re
from dataclasses import replace

import numpy as np
import pytest

from firecaffe.errors import RecipeError
from firecaffe.planner.epochs_law import FORM, NOISE_FACTOR, BatchPoint, Deviations, EpochsLaw


def law(
    *points: tuple[float, float], form: Deviations = FORM, noise: float | None = None
) -> EpochsLaw:
    return EpochsLaw("90 %", tuple(BatchPoint(*point) for point in points), "a test", form, noise)


def test_the_closed_form_is_recovered() -> None:
    for batches in ((64, 512), (16, 64, 256, 1024, 4096)):
        exact = law(*((batch, 20 * (1 + batch / 700)) for batch in batches))
        assert (exact.e_min, exact.b_crit) == pytest.approx((20, 700))
        for batch in (100, 1000):
            assert exact.epochs_at(batch).epochs == pytest.approx(20 * (1 + batch / 700))


def test_independent_deviations_are_weighted_least_squares_of_relative_errors() -> None:
    rows = [(64, 10.0, 0.2, 5), (128, 14.0, 1.0, 20), (512, 15.0, 0.4, 3), (1024, 24.0, 2.0, 2)]
    fitted = EpochsLaw("", tuple(BatchPoint(*row) for row in rows), "", Deviations(0.05, 0.0, 2.0))
    batches, epochs, spreads, runs = np.array(rows).T
    deviations = epochs * np.sqrt((spreads / epochs) ** 2 / runs + 0.05**2)
    slope, least = np.polyfit(batches, epochs, 1, w=1 / deviations)
    assert (fitted.e_min, fitted.b_crit) == pytest.approx((least, least / slope))


def width(of: EpochsLaw, batch: float) -> float:
    low, middle, high = of.band_at(batch)
    assert low < middle < high
    return high / low - 1


def test_the_band_widens_beyond_the_points_and_by_what_the_fit_misses() -> None:
    points = [(64.0, 10.0), (128.0, 11.0), (256.0, 13.0), (512.0, 17.0)]
    exact, off = law(*points), law(*points[:2], (256.0, 20.0), points[3])
    assert width(exact, 128) < width(exact, 181) < width(exact, 1024) < width(exact, 4096)
    assert width(exact, 32) > width(exact, 64)
    for batch in (128, 181, 1024):
        assert width(off, batch) > 1.5 * width(exact, batch)
    assert width(law(*points[:2]), 181) > width(exact, 181)


def test_beyond_its_range_it_gives_a_lower_bound() -> None:
    known = law((64, 10), (256, 13))
    assert known.range == (32, 512)
    at_end, beyond, below = (known.epochs_at(batch) for batch in (512, 513, 31))
    assert (at_end.is_at_least, beyond.is_at_least, below.is_at_least) == (False, True, True)
    assert (beyond.epochs, beyond.low, beyond.high) == (at_end.epochs, at_end.low, None)
    assert below.epochs == pytest.approx(9)  # E_min


def test_points_that_do_not_rise_and_points_in_proportion() -> None:
    assert law((64, 10), (256, 10)).b_crit == law((64, 10), (256, 9)).b_crit == np.inf
    steep = law((64, 10), (256, 50))
    assert (steep.e_min, steep.b_crit) == (0, 0)
    assert replace(steep, target="95 %").epochs_at(128).target == "95 %"


def test_the_noise_scale_counts_where_batches_do_not_tell() -> None:
    """One batch and the scale are a law."""
    rough = law((64, 12), noise=80)
    assert rough.b_crit == pytest.approx(NOISE_FACTOR * 80, rel=1e-4)
    assert rough.epochs_at(64).epochs == pytest.approx(12)
    assert rough.range == (4, 1024)
    assert 1.2 < width(rough, 1024) < 12  # of 1 + B / B_crit, whose B_crit is 2 to 8 times off
    exact = [(batch, 20 * (1 + batch / 700)) for batch in (64, 512, 4096)]
    assert law(*exact, noise=20).b_crit == pytest.approx(700, rel=0.05)
    close = [(64, 10.0), (80, 10.1)]
    assert law(*close).b_crit > 800
    assert 250 < law(*close, noise=100).b_crit < 600
    flat = law((64, 10), (80, 10), noise=100)
    assert law((64, 10), (80, 10)).b_crit == np.inf
    assert 200 < flat.b_crit < 1000
    low, high = flat.b_crit_band
    second_low, second_high = law((64, 10), (1024, 50), noise=100).b_crit_band
    assert second_high / second_low < high / low / 4


@pytest.mark.parametrize(
    ("points", "said"),
    [
        ([], "0 batches with known epochs; a law needs at least 2"),
        ([(64, 10)], "1 batch with known epochs; a law needs at least 2"),
        ([(64, 10), (64, 11)], "batch 64 is given twice; give the mean of its epochs"),
        ([(64, 10), (0, 11)], "0=11 is no batch and its epochs; both must be numbers above 0"),
        ([(64, 10), (128, float("nan"))], "128=nan is no batch"),
    ],
)
def test_what_bears_no_law_is_refused(points: list[tuple[float, float]], said: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(said)):
        law(*points)
