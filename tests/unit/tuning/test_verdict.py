"""The verdict on planted accuracies."""

from typing import Any

import numpy as np
import pytest

from firecaffe.tuning.accuracy_verdict import KEPT, LOST, UNDECIDED, judge

BEFORE = [0.900, 0.901, 0.902]
BAND = 0.003


def results(top1s: list[float]) -> list[dict[str, Any]]:
    words = {"largest_class_share": 0.1, "test_samples": 10_000}
    return [{"top1": top1, **words} for top1 in top1s]


@pytest.mark.parametrize(
    ("after", "verdict", "words"),
    [
        (BEFORE, KEPT, "+0.00 (-0.23 to +0.23) points; up to 0.3 may be lost"),
        ([0.910, 0.911, 0.912], KEPT, "+1.00"),
        ([0.880, 0.881, 0.882], LOST, "88.10 ± 0.25 % (n = 3) against 90.10"),
        ([0.899, 0.900, 0.898], UNDECIDED, "-0.20 ("),  # its mean alone would be within the band
        ([0.890, 0.898, 0.903], UNDECIDED, "more of each would do"),
        ([0.9], UNDECIDED, "of each would do: 90.00 % (n = 1)"),
        ([0.92, 0.85, 0.35], UNDECIDED, "median 85.00 % (35.00, 85.00, 92.00)"),  # 70.67 ± 76.9
        ([0.899, 0.1004, 0.902], LOST, "1 of 3 runs did not learn"),
    ],
)
def test_verdicts(after: list[float], verdict: str, words: str) -> None:
    found = judge(results(BEFORE), results(after), BAND)
    assert found.verdict == verdict
    assert found.words.startswith(verdict)
    assert words in found.words
    assert bool(found.more) == (verdict == UNDECIDED)


def test_a_baseline_that_failed_has_nothing_to_keep() -> None:
    found = judge(results([0.1, 0.9, 0.9]), results(BEFORE), BAND)
    assert (found.verdict, found.more) == (UNDECIDED, None)
    assert "the recipe as it is: 1 of 3 runs did not learn" in found.words


@pytest.mark.parametrize("correct", range(9000, 9010))
def test_a_loss_of_exactly_the_band_is_kept(correct: int) -> None:
    """30 of 10,000 images, however the floats fall."""
    before, after = [correct / 10_000] * 3, [(correct - 30) / 10_000] * 3
    assert judge(results(before), results(after), BAND).verdict == KEPT
    one_more = [(correct - 31) / 10_000] * 3
    assert judge(results(before), results(one_more), BAND).verdict == LOST


def test_the_band_is_the_users() -> None:
    for band, verdict in ((0.01, KEPT), (0.006, UNDECIDED), (0.002, LOST)):
        assert judge(results(BEFORE), results([0.893, 0.894, 0.895]), band).verdict == verdict


def test_a_loss_of_the_band_is_seldom_called_kept() -> None:
    """Nor lost: each of them in 2.5 % of such searches at most, with room for 150 of them."""
    generator = np.random.default_rng(0)
    said = [
        judge(
            results(generator.normal(0.9, 0.002, 5).tolist()),
            results(generator.normal(0.9 - BAND, 0.002, 5).tolist()),
            BAND,
        ).verdict
        for _ in range(150)
    ]
    assert said.count(KEPT) <= 9
    assert said.count(LOST) <= 9


@pytest.mark.parametrize(
    ("after", "verdict"), [([2.0, 2.01, 2.02], KEPT), ([3.0, 3.01, 3.02], LOST)]
)
def test_of_an_error_less_is_kept(after: list[float], verdict: str) -> None:
    words = {"metric": "mae", "higher_is_better": False, "shares": []}
    before = [{"mae": value, **words} for value in (2.5, 2.51, 2.52)]
    found = judge(before, [{"mae": value, **words} for value in after], None)
    assert found.verdict == verdict
    assert found.band == pytest.approx(0.0251)
    assert f"{after[1] - 2.51:+.4g}" in found.words
    assert "%" not in found.words
