"""Compression of networks: the recipe's [prune] and [share] sections, and small files."""

from dataclasses import dataclass, field
from typing import Literal

from firecaffe.errors import RecipeError
from firecaffe.value_checks import MAX_STEPS, check_limits

MAGNITUDE: Literal["magnitude"] = "magnitude"
GRADUAL = "gradual"
SURGERY = "surgery"
LAYER: Literal["layer"] = "layer"
ALL = "all"
ADAPTIVE = "adaptive"

MAX_BITS = 16
"""The most bits of a shared weight. A layer with more values than 2^16 is not shared."""


@dataclass(frozen=True)
class PruneConfig:
    """Which weights are pruned: they are zero, and stay zero.

    Args:
        keep: The share of its weights that each layer keeps, those of largest magnitude, by
            patterns of layers' names, as `keep = { "classifier.*" = 0.1 }`. The last pattern that
            matches decides. Biases are not pruned unless they are named, as `"*.bias"`. Weights
            that are zero at the start stay zero; 1 prunes no others.
        threshold: Instead, weights below this many standard deviations of the layer's weights are
            pruned, by patterns in the same form.
        how: When weights are pruned. magnitude: at the start. gradual: more and more over `steps`,
            by a cubic schedule, up to `keep`. surgery: at the start, but pruned weights are still
            trained, without use, until `steps`, and return if they become larger than others.
        steps: The steps over which weights are pruned and return; afterwards the mask is fixed.
        every: Choose the weights anew after each of this many of these steps.
        scope: Among which weights the largest are kept. layer: each layer's. all: those of all
            matching layers, as many as their shares amount to together. adaptive: as all, but a
            weight counts by its square over the sum of squares of its layer's weights that are as
            large or larger (LAMP), so that no layer loses all.
    """

    keep: dict[str, float] = field(default_factory=dict)
    threshold: dict[str, float] = field(default_factory=dict)
    how: Literal["magnitude", "gradual", "surgery"] = MAGNITUDE
    steps: int = 0
    every: int = 100
    scope: Literal["layer", "all", "adaptive"] = LAYER

    @property
    def is_on(self) -> bool:
        """Whether any layer is pruned."""
        return bool(self.keep or self.threshold)


@dataclass(frozen=True)
class ShareConfig:
    """Which layers' weights share few values.

    Args:
        bits: Bits of a weight, by patterns of layers' names, as `bits = { "classifier.*" = 5 }`:
            the weights of a layer that are not zero have 2^bits values, found by k-means at the
            start. The last pattern that matches decides. Biases by their own names, as `"*.bias"`.
        start: The first values of k-means. linear: at equal distances. density: with equally many
            weights between each two. random: random weights.
        train: Train the values further. false: they are fixed, and unshared weights are trained.
        gradient: The gradient of a value, from those of its weights. sum: the derivative by the
            value. mean: the sum over their number, for which the network's own learning rate is
            suitable.
    """

    bits: dict[str, int] = field(default_factory=dict)
    start: Literal["linear", "density", "random"] = "linear"
    train: bool = True
    gradient: Literal["sum", "mean"] = "sum"

    @property
    def is_on(self) -> bool:
        """Whether any layer's weights are shared."""
        return bool(self.bits)


def check_prune(words: PruneConfig) -> None:
    for pattern, share in words.keep.items():
        if not 0 < share <= 1:
            raise RecipeError(
                f"prune.keep {pattern!r} is {share}; it must be above 0 and at most 1: the share "
                "of a layer's weights that stays"
            )
    for pattern, deviations in words.threshold.items():
        if not 0 < deviations < float("inf"):
            raise RecipeError(f"prune.threshold {pattern!r} is {deviations}; it must be above 0")
    check_limits("prune", words, {"every": (1, MAX_STEPS), "steps": (0, MAX_STEPS)})


def check_share(words: ShareConfig) -> None:
    for pattern, bits in words.bits.items():
        if not 1 <= bits <= MAX_BITS:
            raise RecipeError(f"share.bits {pattern!r} is {bits}; it must be 1 to {MAX_BITS}")


def prune_notes(words: PruneConfig, steps: int) -> list[str]:
    """Warn if a training of so many steps ends before its masks are final."""
    if not words.is_on or words.how == MAGNITUDE or words.steps <= steps:
        return []
    return [
        f"warning: prune.steps is {words.steps}, the training ends after {steps}, when weights are "
        "still being pruned"
    ]
