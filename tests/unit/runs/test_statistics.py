"""Intervals, verdicts and numbers of runs against scipy, and against simulated experiments; the
noise scale of gradients whose covariance is known, and how often its band holds it.
"""

import json
from math import exp, inf, log, sqrt
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from firecaffe.runs.noise_scale import (
    CONFIDENCE,
    GradientNorms,
    NoiseScale,
    noise_lines,
    noise_scale,
)
from firecaffe.runs.statistics import (
    BAND,
    DIFFERENT,
    EQUIVALENT,
    POWER,
    UNDECIDED,
    differences,
    mean_of,
    ratios,
    runs_enough,
)

FIRST = [20.4, 24.2, 15.4, 21.4, 20.2, 18.5, 21.5]
SECOND = [20.2, 16.9, 18.5, 17.3, 20.5]


def test_a_mean_has_students_interval() -> None:
    mean = mean_of([0.90, 0.92, 0.91])
    assert mean.value == pytest.approx(0.91)
    assert mean.values == (0.90, 0.91, 0.92)
    assert mean.half == pytest.approx(4.302652730 * 0.01 / sqrt(3))  # t at 97.5 %, 2 degrees
    assert mean_of([0.5]).half == inf
    with pytest.raises(ValueError, match="no mean"):
        mean_of([])


def test_a_difference_is_welchs() -> None:
    """The unequal-variance example of scipy's reference, and Hedges' g from its definition."""
    (found,) = differences(FIRST, [SECOND])
    expected = stats.ttest_ind(SECOND, FIRST, equal_var=False)
    interval = expected.confidence_interval(0.95)
    assert (found.p_value, found.low, found.high) == pytest.approx((expected.pvalue, *interval))
    pooled = sqrt((6 * np.var(FIRST, ddof=1) + 4 * np.var(SECOND, ddof=1)) / 10)
    correction = 1 - 3 / (4 * 10 - 1)  # the usual approximation
    assert found.effect == pytest.approx(correction * found.value / pooled, rel=2e-3)


@pytest.mark.parametrize("band", [0.5, 2.0, 4.0, 4.3, 5.0, 8.0])
def test_equivalent_is_two_one_sided_tests(band: float) -> None:
    """Both of scipy's tests against the shifted bounds, each at 2.5 %."""
    (found,) = differences(FIRST, [SECOND], band)
    raised, lowered = ([value + shift for value in SECOND] for shift in (band, -band))
    above = stats.ttest_ind(raised, FIRST, equal_var=False, alternative="greater")
    below = stats.ttest_ind(lowered, FIRST, equal_var=False, alternative="less")
    assert (found.verdict == EQUIVALENT) == (max(above.pvalue, below.pvalue) < 0.025)


def test_p_values_and_intervals_are_corrected_alike() -> None:
    """With more rows in the table the same runs show less, by the one as by the other."""
    first, second = [0.90, 0.91, 0.92], [0.93, 0.945, 0.95]
    verdicts = set()
    for tests in range(1, 12):
        found = differences(first, [second, *([first] * (tests - 1))])[0]
        assert (found.p_value < 0.05) == (not found.low <= 0 <= found.high)
        assert (found.p_value < 0.05) == (found.verdict == DIFFERENT)
        verdicts.add(found.verdict)
    assert verdicts == {DIFFERENT, UNDECIDED}


def test_values_without_any_spread() -> None:
    """A loss of exactly the band, 30 of 10,000 images, is inside, however the floats fall."""
    for correct in range(9000, 9010):
        others = [[(correct - lost) / 10_000] * 3 for lost in (0, 30, 31)]
        same, at, beyond = differences(others[0], others)
        assert (same.verdict, at.verdict, beyond.verdict) == (EQUIVALENT, EQUIVALENT, DIFFERENT)
        assert beyond.effect == -inf
    # Student's test of one sample against a number is Welch's where one variance is 0.
    (found,) = differences([0.90, 0.91, 0.93], [[0.1] * 3])
    expected = stats.ttest_1samp([0.90, 0.91, 0.93], 0.1)
    assert found.p_value == pytest.approx(expected.pvalue)
    assert found.verdict == DIFFERENT


def test_few_runs_say_nothing() -> None:
    for first, second, more in ((3, 2, 1), (3, 1, 2), (1, 1, 2)):  # to FEWEST on each side
        (found,) = differences([0.9] * first, [[0.9] * second])
        assert (found.verdict, found.low, found.more) == (UNDECIDED, -inf, more)
    assert runs_enough(0.01, [[0.0]]) is None  # which no number of runs decides
    noisy = [0.1, 0.9, 0.5, 0.45]
    (found,) = differences(noisy, [noisy])
    assert (found.verdict, found.more) == (UNDECIDED, None)


def experiments(value: float, spread: float, runs: int, count: int) -> list[str]:
    """The verdicts on so many experiments with this true difference."""
    generator = np.random.default_rng(0)
    sides = [
        [generator.normal(mean, spread, runs).tolist() for mean in (0.9, 0.9 + value)]
        for _ in range(count)
    ]
    return [differences(first, [second])[0].verdict for first, second in sides]


@pytest.mark.parametrize(("value", "spread"), [(0.0005, 0.002), (0.004, 0.004)])
def test_as_many_runs_as_are_said_to_do_do(value: float, spread: float) -> None:
    """POWER of such experiments decide; half as many runs would not do."""
    enough = runs_enough(spread, [[abs(value)], [BAND - value, BAND + value]])
    assert enough is not None
    count = 120
    decided, fewer = (
        1 - experiments(value, spread, runs, count).count(UNDECIDED) / count
        for runs in (enough, enough // 2)
    )
    assert decided > POWER - 0.06
    assert fewer < POWER - 0.2


def test_a_ratio_of_times() -> None:
    """By scipy's Welch interval of the logarithms; corrected as so many rows are."""
    slow, fast = [16.0, 17.1, 15.2, 16.3], [4.1, 4.0, 4.3]
    logs = [[log(time_s) for time_s in side] for side in (slow, fast)]
    found, _ = ratios(slow, [fast, slow])
    low, high = stats.ttest_ind(*logs, equal_var=False).confidence_interval(0.975)
    value = stats.gmean(slow) / stats.gmean(fast)
    assert (found.low, found.value, found.high) == pytest.approx((exp(low), value, exp(high)))
    assert found.is_shown
    assert not ratios(slow, [slow])[0].is_shown
    (alone,) = ratios(slow, [[4.0]])
    assert (alone.low, alone.high, alone.is_shown) == (0.0, inf, False)


MICRO, LEAVES, SIZE = 4, 8, 50
DEVIATIONS = torch.linspace(0.2, 2.0, SIZE).double()
TRACE = float(DEVIATIONS.square().sum())


def measured(steps: int, scale: float, generator: torch.Generator) -> list[GradientNorms]:
    """Of gradients with a known mean and normal noise, so that tr(Σ) / |G|² is `scale`."""
    mean = torch.full((SIZE,), (TRACE / scale / SIZE) ** 0.5).double()
    noise = torch.randn(steps, LEAVES, SIZE, generator=generator, dtype=torch.float64)
    leaves = mean + noise * DEVIATIONS / MICRO**0.5
    micro, batch = leaves.square().sum(2).mean(1), leaves.mean(1).square().sum(1)
    return [
        GradientNorms(20 * step + 21, *norms)
        for step, norms in enumerate(zip(micro.tolist(), batch.tolist(), strict=True))
    ]


def scale_of(rows: list[GradientNorms]) -> NoiseScale:
    scale = noise_scale(rows, MICRO, MICRO * LEAVES)
    assert scale is not None
    return scale


def test_a_known_covariance() -> None:
    """From far below the batch of 32 to twenty times it."""
    generator = torch.Generator().manual_seed(1)
    for scale, tolerance in ((3.0, 0.02), (40.0, 0.03), (640.0, 0.2)):
        found = scale_of(measured(4000, scale, generator))
        assert found.samples == pytest.approx(scale, rel=tolerance)
        assert found.low < (found.samples or 0) < (found.high or 0)
        assert found.steps[:2] == [21, 41]


def test_bands_hold_the_scale_as_often_as_they_say() -> None:
    """With few measured steps and with many; also where some bands have no end."""
    generator, times = torch.Generator().manual_seed(2), 400
    for steps, scale in ((5, 40.0), (12, 40.0), (60, 40.0), (60, 640.0)):
        scales = [scale_of(measured(steps, scale, generator)) for _ in range(times)]
        held = sum(s.low <= scale and (s.high is None or scale <= s.high) for s in scales)
        assert held / times == pytest.approx(CONFIDENCE, abs=0.06), (steps, scale)


def test_what_is_not_known() -> None:
    generator = torch.Generator().manual_seed(3)
    assert noise_scale(measured(3, 40.0, generator), MICRO, MICRO * LEAVES) is None
    # Without any gradient no scale is too large.
    found = scale_of(measured(60, 1e9, generator))
    assert (found.high, found.low > 100) == (None, True)
    # Without noise, one sample is enough.
    for norm, expected in ((0.0, (None, 0.0, None)), (2.0, (0.0, 0.0, 0.0))):
        found = scale_of([GradientNorms(step, norm, norm) for step in range(9)])
        assert (found.samples, found.low, found.high) == expected


def test_what_is_said(tmp_path: Path) -> None:
    """The last scale that the run has recorded."""
    assert noise_lines(tmp_path) == []
    ends = {"noise_scale_low": 980.2, "noise_scale": 1240.4, "noise_scale_high": 1601.0}
    rows: list[dict[str, float]] = [{"noise_scale_low": 8.3}, {}, ends, {}]
    lines = [json.dumps({"kind": "train", "step": n, **row}) for n, row in enumerate(rows)]
    for count, said in ((4, "1,240 samples (980 to 1,600)"), (1, "at least 8.3 samples")):
        (tmp_path / "metrics.jsonl").write_text("\n".join(lines[:count]) + "\n")
        (line,) = noise_lines(tmp_path)
        assert said in line
