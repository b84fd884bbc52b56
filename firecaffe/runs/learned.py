"""Whether a run has learned anything: more than to name the most frequent class, or the mean.

A network that diverges, or dies, ends as one that always gives the same answer. Its top-1 is then
the share of the largest class, and no accuracy to compare with.
"""

from collections.abc import Mapping, Sequence
from typing import Any

SIGNIFICANCE = 0.001
"""Probability with which a network that learned nothing may be taken for one that did."""


def has_learned(result: Mapping[str, Any]) -> bool | None:
    """Whether a run's top-1 is above the share of the test set's largest class by more than chance
    (binomial); whether the R² of a regression is above 0, that of the targets' mean. None if its
    record, result.json, does not have them.
    """
    share, samples = (result.get(name) for name in ("largest_class_share", "test_samples"))
    if share and samples and "top1" in result:
        # Takes a second, and most who import this file do not test.
        from scipy.stats import binomtest

        correct = round(result["top1"] * samples)
        return bool(binomtest(correct, samples, share, alternative="greater").pvalue < SIGNIFICANCE)
    if result.get("r2") is not None:
        return bool(result["r2"] > 0)
    return None


def failure(results: Sequence[Mapping[str, Any]]) -> str:
    """What is to be said of runs of which some are known to have failed; empty if none is."""
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
