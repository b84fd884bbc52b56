"""What each layer bears alone, and what all are then asked to: a pure choice.

A layer's sensitivity is what the network loses if that layer alone is pruned, or shares its values,
and nothing is trained again. Bytes have one price in all layers: each takes the share and the bits
at which what it loses, with the price of its bytes, is least. The higher the price, the smaller the
file, so a size finds its price. A small layer so keeps more than a large one that bears the same.
Retraining brings back most of what is lost, so it is no forecast of the file's accuracy.

Sources: Han, Pool, Tran, Dally 2015 (arXiv 1506.02626), section 4 and figure 6 (sensitivities);
Shoham and Gersho 1988 (a budget of bits shared out by one price).

What a network loses if one layer alone is pruned, or shares its values; nothing is trained.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import exp, log, log2
from typing import Any, Self

import torch
from torch import Tensor, nn

from firecaffe.compression.config import MOST_BITS, PruneConfig
from firecaffe.compression.layers import BIAS, pruned_weights
from firecaffe.compression.prune import count_of, largest
from firecaffe.compression.share import share as share_values

KEEPS = (0.5, 0.35, 0.25, 0.18, 0.12, 0.08, 0.055, 0.035, 0.025, 0.015, 0.01, 0.006, 0.004)
"""Shares of a layer's weights that are tried."""

BITS = (8, 6, 5, 4, 3)
"""Bits of a shared value that are tried: 2 to that power of values. Two bits, which the layers of
LeNet-300-100 bear alone, cost 0.3 points once they were pruned, and saved a tenth of the file.
"""

BITS_WEIGHT = 5.0
"""How much more a loss by few values counts than one by few weights. Our own choice: retraining
finds other weights for those that are gone, but a weight keeps its value's place.
"""

FLOOR = 0.05
"""Points below which a loss is chance: one of 2,000 samples."""

CREDIBLE = 0.5
"""The part of the most that was lost, above which a loss says no more: near the level of chance
nothing can be lost any more. Beyond, losses are taken to grow on as they did before.
"""

SLOWEST, FASTEST = 1.0, 4.0
"""Bounds of that growth: exponents of one over the share."""

FEWEST = 4
"""Weights that every layer keeps: with none it is no layer."""

SHARES = tuple(0.93**step for step in range(110))
"""Shares that are chosen from, down to 0.04 %."""

MOST_PRICE, LEAST_PRICE = 1e6, 1e-12
"""Points for a byte."""

_STEPS = 60


@dataclass(frozen=True)
class LayerSensitivity:
    """What the network loses if this layer alone is pruned, or shares its values; gains are below
    0.
    """

    name: str
    """The pattern that means it: a layer's name, or a bias's own."""
    weights: int
    keeps: Mapping[float, float]
    """By the share of the weights that are kept; empty if it is not to be pruned."""
    bits: Mapping[int, float]
    """By the bits of a shared value; empty if it is not to share any."""

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
"""By the name of each layer."""

Row = tuple[float, float, LayerChoice]
"""What a choice loses, and its bytes."""


def estimated_bytes(weights: int, chosen: LayerChoice) -> float:
    """About what a layer takes in a file: which weights are kept, by the entropy of that, the kept
    ones' values, and the values themselves unless each weight has its own.
    """
    kept = weights * chosen.keep
    mask_bits = weights * _entropy(chosen.keep)
    book_bits = 32 * min(1 << chosen.bits, kept) if chosen.bits < MOST_BITS else 0
    return (mask_bits + kept * chosen.bits + book_bits) / 8


def _entropy(share: float) -> float:
    """Bits of one answer that is yes with this probability."""
    if not 0 < share < 1:
        return 0.0
    return -share * log2(share) - (1 - share) * log2(1 - share)


def choose(layers: Sequence[LayerSensitivity], size_bytes: float, rest_bytes: float) -> Choice:
    """Chooses for each layer so that all are about size_bytes together.

    First the price at which they would be as large or larger; then all keep the same part of that.

    rest_bytes: what the file holds besides.
    """
    wanted = max(size_bytes - rest_bytes, 1.0)
    most = max(FLOOR, *(lost for layer in layers for lost in layer.keeps.values()))
    tables = {layer.name: _rows(layer, CREDIBLE * most) for layer in layers}

    def size(choice: Choice) -> float:
        return sum(estimated_bytes(layer.weights, choice[layer.name]) for layer in layers)

    def at(price: float) -> Choice:
        return {
            name: min(rows, key=lambda row: row[0] + price * row[1])[2]
            for name, rows in tables.items()
        }

    def part(factor: float) -> Choice:
        return {
            layer.name: replace(each, keep=_at_least_few(layer, each.keep * factor))
            if layer.keeps
            else each
            for layer in layers
            for each in [chosen[layer.name]]
        }

    chosen = at(_last(lambda price: size(at(price)) >= wanted, LEAST_PRICE, MOST_PRICE))
    return part(_last(lambda factor: size(part(factor)) <= wanted, 1e-4, 1e4))


def _last(holds: Callable[[float], bool], low: float, high: float) -> float:
    """The largest number up to which something holds; low if it never does. By halving on the
    logarithm.
    """
    if holds(high):
        return high
    for _ in range(_STEPS):
        middle = exp((log(low) + log(high)) / 2)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _rows(layer: LayerSensitivity, credible: float) -> list[Row]:
    """All that a layer may be asked, most weights first."""
    shares = SHARES if layer.keeps else (1.0,)
    losses = _by_bits(layer.bits)
    rows = []
    for share in shares:
        lost = _by_share(layer.keeps, share, credible)
        for bits, more in losses.items():
            choice = LayerChoice(_at_least_few(layer, share), bits)
            size = estimated_bytes(layer.weights, choice)
            rows.append((lost + BITS_WEIGHT * more, size, choice))
    return rows


def _at_least_few(layer: LayerSensitivity, keep: float) -> float:
    return min(1.0, max(keep, FEWEST / layer.weights))


def _by_share(keeps: Mapping[float, float], share: float, credible: float) -> float:
    """What is lost with a share, between and below those that were tried: straight between their
    logarithms. A share never loses less than a larger one did.
    """
    points = [(1.0, FLOOR)]
    for keep in sorted(keeps, reverse=True):
        lost = max(points[-1][1], keeps[keep])
        points.append((keep, min(lost, max(credible, FLOOR))))
        if lost > credible:
            break
    for (before, first), (after, second) in pairwise(points):
        if share >= after:
            part = log(before / share) / log(before / after)
            return exp(log(first) + part * log(second / first))
    growth = SLOWEST
    if len(points) > 1:
        (before, first), (after, second) = points[-2:]
        growth = log(second / first) / log(before / after)
    last, lost = points[-1]
    return float(lost * (last / share) ** min(max(growth, SLOWEST), FASTEST))


def _by_bits(bits: Mapping[int, float]) -> dict[int, float]:
    """What is lost by the bits of a value; of a layer that shares none, of numbers of their own."""
    if not bits:
        return {MOST_BITS: 0.0}
    lost, found = 0.0, {}
    for each in sorted(bits, reverse=True):
        lost = max(lost, bits[each])
        found[each] = lost
    return found


Score = Callable[[], float]
"""What the network is worth as it is now; more is better."""


@dataclass(frozen=True)
class Layer:
    """Parameters that are tried together."""

    name: str
    """The pattern that means them: a layer's name, or a bias's own."""
    weights: Sequence[nn.Parameter]
    keeps: Sequence[float] = KEEPS
    """Shares that may be kept beside all."""
    bits: Sequence[int] = BITS
    """Bits that values may have beside 16."""


@torch.no_grad()
def measure_layers(layers: Sequence[Layer], score: Score) -> list[LayerSensitivity]:
    """Tries every layer at every level, and leaves the weights as they were."""
    before = score()
    found = []
    for layer in layers:
        kept = {keep: before - _with(layer.weights, _pruned(keep), score) for keep in layer.keeps}
        bits = {each: before - _with(layer.weights, _shared(each), score) for each in layer.bits}
        count = sum(each.numel() for each in layer.weights)
        found.append(LayerSensitivity(layer.name, count, kept, bits))
    return found


def _with(
    weights: Sequence[nn.Parameter], change: Callable[[Tensor], Tensor], score: Score
) -> float:
    """The score with other weights in the layer's place."""
    own = [each.detach().clone() for each in weights]
    for each in weights:
        each.copy_(change(each.detach()))
    try:
        return score()
    finally:
        for each, kept in zip(weights, own, strict=True):
            each.copy_(kept)


def _pruned(keep: float) -> Callable[[Tensor], Tensor]:
    def change(weight: Tensor) -> Tensor:
        mask = largest({"": weight.abs()}, {"": count_of(keep, weight.numel())})[""]
        return weight * mask

    return change


def _shared(bits: int) -> Callable[[Tensor], Tensor]:
    def change(weight: Tensor) -> Tensor:
        codes, values = share_values(weight, bits, "density", torch.Generator())
        return values.to(weight.dtype)[codes.long()].to(weight.device)

    return change


def layers_of(network: nn.Module, prunes_biases: bool, shares_biases: bool) -> list[Layer]:
    """What can be pruned and shared by itself: each layer's weights, and biases if a scheme does
    something with them.
    """
    named = dict(network.named_parameters())
    weights: dict[str, list[nn.Parameter]] = {}
    for name in pruned_weights(named, PruneConfig(keep={"*": 0.5}))[0]:
        weights.setdefault(name.rpartition(".")[0], []).append(named[name])
    layers = [Layer(name, each) for name, each in weights.items()]
    if prunes_biases or shares_biases:
        keeps = KEEPS if prunes_biases else ()
        bits = BITS if shares_biases else ()
        layers += [
            Layer(name, [each], keeps, bits)
            for name, each in named.items()
            if name.endswith(BIAS) and each.any()
        ]
    return layers
