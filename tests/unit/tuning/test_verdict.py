"""The verdict on planted accuracies."""

import pytest

from firecaffe.tuning.verdict import judge

BEFORE = [0.900, 0.901, 0.902]


@pytest.mark.parametrize(
    ("after", "is_kept", "words"),
    [
        (BEFORE, True, "+0.00 points (-0.23 to +0.23); up to 0.3 may be lost"),
        ([0.910, 0.911, 0.912], True, "+1.00 points"),
        ([0.880, 0.881, 0.882], False, "lost: 88.10 ± 0.25 % (n = 3) against 90.10"),
        ([0.899, 0.900, 0.898], True, "the interval has both verdicts in it"),
        ([0.890, 0.898, 0.903], False, "the interval has both verdicts in it"),
        ([0.9], True, "not enough runs to say (3 and 1 runs, of 3 at least)"),
    ],
)
def test_verdicts(after: list[float], is_kept: bool, words: str) -> None:
    verdict = judge(BEFORE, after, 0.003)
    assert verdict.is_kept is is_kept
    assert verdict.words.startswith("kept" if is_kept else "lost")
    assert words in verdict.words


@pytest.mark.parametrize("correct", range(9000, 9010))
def test_a_loss_of_exactly_the_band_is_kept(correct: int) -> None:
    """30 of 10,000 images, however the floats fall."""
    before, after = [correct / 10_000] * 3, [(correct - 30) / 10_000] * 3
    assert judge(before, after, 0.003).is_kept
    assert not judge(before, [(correct - 31) / 10_000] * 3, 0.003).is_kept


def test_the_band_is_the_users() -> None:
    assert judge(BEFORE, [0.893, 0.894, 0.895], 0.01).is_kept
    assert not judge(BEFORE, [0.893, 0.894, 0.895], 0.005).is_kept
