"""What each layer bears alone, and what all are then asked to: a pure choice.

A layer's sensitivity is what the network loses if that layer alone is pruned, or shares its values,
and nothing is trained again. One tolerance serves all layers: each keeps as little as loses no more
than that alone. The larger the tolerance, the smaller the file, so a size finds its tolerance.
Retraining brings back most of what is lost, so the tolerance is no forecast of the file's accuracy.

Source: Han, Pool, Tran, Dally 2015 (arXiv 1506.02626), section 4 and figure 6: thresholds by the
sensitivity of each layer; here they are found and not set by hand.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, log2
from typing import Any, Self

KEEPS = (0.5, 0.35, 0.25, 0.18, 0.12, 0.08, 0.055, 0.035, 0.025, 0.015, 0.01, 0.006, 0.004)
"""Shares of a layer's weights that are tried."""

BITS = (8, 6, 5, 4, 3, 2)
"""Bits of a shared value that are tried: 2 to that power of values."""

BITS_TOLERANCE = 0.2
"""The part of the tolerance that sharing may cost: a bit less of the kept weights brings little,
for most of a small file says where they are.
"""

SLOPE = 0.01
"""Points that a layer is said to lose with each half of its weights, whatever was measured: where
nothing more is lost, as at the level of chance, sizes between two levels can be had too.
"""

FEWEST = 4
"""Weights that every layer keeps: with none it is no layer."""

_STEPS = 60


@dataclass(frozen=True)
class LayerSensitivity:
    """What the network loses if this layer alone is pruned, or shares its values; gains are below
    0.
    """

    name: str
    """Of its weights, as conv1.weight."""
    weights: int
    keeps: Mapping[float, float]
    """By the share of the weights that are kept."""
    bits: Mapping[int, float]
    """By the bits of a shared value."""

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Self:
        """From JSON, whose keys are text. Raises: KeyError, TypeError, ValueError."""
        keeps = {float(keep): float(lost) for keep, lost in row["keeps"].items()}
        bits = {int(each): float(lost) for each, lost in row["bits"].items()}
        return cls(str(row["name"]), int(row["weights"]), keeps, bits)


@dataclass(frozen=True)
class LayerChoice:
    """What a layer is asked to bear."""

    keep: float
    bits: int


Choice = Mapping[str, LayerChoice]
"""By the name of each layer's weights."""


def estimated_bytes(weights: int, chosen: LayerChoice) -> float:
    """About what a layer takes in a file: which weights are kept, by the entropy of that, the kept
    ones' values, and the values themselves.
    """
    kept = weights * chosen.keep
    mask_bits = weights * _entropy(chosen.keep)
    return (mask_bits + kept * chosen.bits + 32 * min(1 << chosen.bits, kept)) / 8


def _entropy(share: float) -> float:
    """Bits of one answer that is yes with this probability."""
    if not 0 < share < 1:
        return 0.0
    return -share * log2(share) - (1 - share) * log2(1 - share)


def choose(layers: Sequence[LayerSensitivity], size_bytes: float, rest_bytes: float) -> Choice:
    """Chooses for each layer so that all are about size_bytes together; smaller than the least that
    was tried if it takes that.

    rest_bytes: what the file holds besides: biases, its header.
    """
    wanted = max(size_bytes - rest_bytes, 1.0)
    most = max(max(layer.keeps.values()) for layer in layers)
    least = min(1e-6, most)

    def size(choice: Choice) -> float:
        return sum(estimated_bytes(layer.weights, choice[layer.name]) for layer in layers)

    def at(tolerance: float) -> Choice:
        return {layer.name: _borne(layer, tolerance) for layer in layers}

    if size(at(most)) > wanted:

        def fewer(share: float) -> Choice:
            return {
                layer.name: LayerChoice(_at_least_few(layer, each.keep * share), each.bits)
                for layer in layers
                for each in [at(most)[layer.name]]
            }

        return _bisect(fewer, size, wanted, 1e-3, 1.0)
    return _bisect(lambda inverse: at(1 / inverse), size, wanted, 1 / most, 1 / least)


def _bisect(
    of: Callable[[float], Choice],
    size: Callable[[Choice], float],
    wanted: float,
    low: float,
    high: float,
) -> Choice:
    """The largest choice that is no larger than wanted, of a number with which sizes rise; that of
    low if none is so small. The number is halved on its logarithm.
    """
    if size(of(high)) <= wanted:
        return of(high)
    for _ in range(_STEPS):
        middle = exp((log(low) + log(high)) / 2)
        low, high = (middle, high) if size(of(middle)) <= wanted else (low, middle)
    return of(low)


def _borne(layer: LayerSensitivity, tolerance: float) -> LayerChoice:
    """The least that the layer bears."""
    keep = _at_least_few(layer, _least_keep(layer.keeps, tolerance))
    return LayerChoice(keep, _least_bits(layer.bits, tolerance * BITS_TOLERANCE))


def _at_least_few(layer: LayerSensitivity, keep: float) -> float:
    return min(1.0, max(keep, FEWEST / layer.weights))


def _least_keep(keeps: Mapping[float, float], tolerance: float) -> float:
    """Between what was tried it goes by the logarithm of the share. A share never loses less than a
    larger one did.
    """
    share, lost, most = 1.0, 0.0, 0.0
    for next_share in sorted(keeps, reverse=True):
        most = max(most, keeps[next_share])
        next_lost = most - SLOPE * log2(next_share)
        if next_lost > tolerance:
            part = (tolerance - lost) / (next_lost - lost)
            return exp(log(share) + part * (log(next_share) - log(share)))
        share, lost = next_share, next_lost
    return share


def _least_bits(bits: Mapping[int, float], tolerance: float) -> int:
    found = max(bits)
    for fewer in sorted(bits, reverse=True):
        if bits[fewer] > tolerance:
            break
        found = fewer
    return found
