"""Tests whether a run has learned more than to give one answer always, as failed networks do."""

from collections.abc import Mapping, Sequence
from typing import Any

SIGNIFICANCE = 0.001
"""The probability of mistaking a network that learned nothing for one that did."""


def has_learned(result: Mapping[str, Any]) -> bool | None:
    """Whether top-1 is above the largest class's share (binomial test), or R² above 0.

    An R² of 0 is that of the targets' mean. None if the result has neither.
    """
    share, samples = (result.get(name) for name in ("largest_class_share", "test_samples"))
    if share and samples and "top1" in result:
        # This import takes a second, and most modules that import this file do not test.
        from scipy.stats import binomtest

        correct = round(result["top1"] * samples)
        return bool(binomtest(correct, samples, share, alternative="greater").pvalue < SIGNIFICANCE)
    if result.get("r2") is not None:
        return bool(result["r2"] > 0)
    return None


def failure(results: Sequence[Mapping[str, Any]]) -> str:
    failed = [result for result in results if has_learned(result) is False]
    if not failed:
        return ""
    share = failed[0].get("largest_class_share")
    least = (
        f"top-1 not above {share:.2%}, the share of the largest class"
        if share
        else "R² not above 0, that of the targets' mean"
    )
    return f"{len(failed)} of {len(results)} runs did not learn ({least})"
