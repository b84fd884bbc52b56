"""The sensitivity of each layer, and the choice of all layers' sizes by sensitivity.

A layer's sensitivity is the network's loss of its metric if only this layer is pruned, or shares
its values, without training. Each layer gets the share and the bits with the minimum of loss plus
price times bytes; the target size determines the price. Retraining restores most of the loss, so
the loss does not predict accuracy.

Sources: Han, Pool, Tran, Dally 2015 (arXiv 1506.02626), section 4 and figure 6 (sensitivities);
Shoham and Gersho 1988 (allocation of a budget of bits by one price).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import exp, log, log2
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from firecaffe.compression import MAX_BITS, PruneConfig
from firecaffe.compression.prune_and_share import BIAS, count_of, largest, pruned_weights
from firecaffe.compression.prune_and_share import share as share_values

T = TypeVar("T")

KEEPS = (0.5, 0.35, 0.25, 0.18, 0.12, 0.08, 0.055, 0.035, 0.025, 0.015, 0.01, 0.006, 0.004)

# Without 2: it costs LeNet-300-100 0.3 points after pruning, and saves a tenth of the file.
BITS = (8, 6, 5, 4, 3)

# Retraining compensates for pruned weights, but a weight cannot leave its cluster.
BITS_WEIGHT = 5.0
"""The weight of a loss by sharing over a loss by pruning. This is our own choice."""

FLOOR = 0.05
"""Points below which a loss is noise: one of 2,000 samples."""

# Near chance level, a network cannot lose any more.
CREDIBLE = 0.5
"""The part of the largest loss up to which losses are used; larger ones are extrapolated."""

SLOWEST, FASTEST = 1.0, 4.0
"""Bounds of the extrapolated growth: exponents of 1 / share."""

FEWEST = 4

SHARES = tuple(0.93**step for step in range(110))
"""The candidate shares, down to 0.04 %."""

MAX_PRICE, MIN_PRICE = 1e6, 1e-12
"""Bounds of the price, in points per byte."""

_STEPS = 60


@dataclass(frozen=True)
class LayerSensitivity:
    """The loss if only this layer is pruned, or shares its values. Gains are negative."""

    name: str
    """The pattern that selects it: the name of a layer or a bias."""
    weights: int
    keeps: Mapping[float, float]
    """Losses by share of kept weights; empty if the layer is not to be pruned."""
    bits: Mapping[int, float]
    """Losses by bits of a shared value; empty if the layer is not to share values."""

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Self:
        keeps = {float(keep): float(lost) for keep, lost in row["keeps"].items()}
        bits = {int(bit): float(lost) for bit, lost in row["bits"].items()}
        return cls(str(row["name"]), int(row["weights"]), keeps, bits)


@dataclass(frozen=True)
class LayerChoice:
    keep: float
    bits: int


Choice = Mapping[str, LayerChoice]

Row = tuple[float, float, LayerChoice]


def estimated_bytes(weights: int, chosen: LayerChoice) -> float:
    """Estimate a layer's bytes: the entropy of its mask, the kept values, and a codebook."""
    kept = weights * chosen.keep
    mask_bits = weights * _entropy(chosen.keep)
    book_bits = 32 * min(1 << chosen.bits, kept) if chosen.bits < MAX_BITS else 0
    return (mask_bits + kept * chosen.bits + book_bits) / 8


def _entropy(share: float) -> float:
    if not 0 < share < 1:
        return 0.0
    return -share * log2(share) - (1 - share) * log2(1 - share)


def choose(layers: Sequence[LayerSensitivity], size_bytes: float, rest_bytes: float) -> Choice:
    """Choose share and bits of each layer for a total of about `size_bytes`.

    First find the highest price at which the file is large enough, then scale all shares equally.
    `rest_bytes` is the size of everything else in the file.
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
            layer.name: replace(layer_choice, keep=_at_least_few(layer, layer_choice.keep * factor))
            if layer.keeps
            else layer_choice
            for layer in layers
            for layer_choice in [chosen[layer.name]]
        }

    chosen = at(_last(lambda price: size(at(price)) >= wanted, MIN_PRICE, MAX_PRICE))
    return part(_last(lambda factor: size(part(factor)) <= wanted, 1e-4, 1e4))


def _last(holds: Callable[[float], bool], low: float, high: float) -> float:
    """Return, by bisection, the largest number up to which `holds` is true; `low` if none."""
    if holds(high):
        return high
    for _ in range(_STEPS):
        middle = exp((log(low) + log(high)) / 2)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _rows(layer: LayerSensitivity, credible: float) -> list[Row]:
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
    """Interpolate the loss at a share, linear in logarithms; extrapolate below the smallest."""
    # A smaller share never loses less than a larger one.
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
    if not bits:
        return {MAX_BITS: 0.0}
    lost, losses = 0.0, {}
    for bit in sorted(bits, reverse=True):
        lost = max(lost, bits[bit])
        losses[bit] = lost
    return losses


Score = Callable[[], float]
"""Function that evaluates the network in its current state; higher is better."""


@dataclass(frozen=True)
class SizedLayer:
    """Parameters that are tried together. `name` is the pattern that selects them."""

    name: str
    weights: Sequence[nn.Parameter]
    keeps: Sequence[float] = KEEPS
    bits: Sequence[int] = BITS


@torch.no_grad()
def measure_layers(layers: Sequence[SizedLayer], score: Score) -> list[LayerSensitivity]:
    before = score()
    sensitivities = []
    for layer in layers:
        kept = {keep: before - _with(layer.weights, _pruned, keep, score) for keep in layer.keeps}
        bits = {bit: before - _with(layer.weights, _shared, bit, score) for bit in layer.bits}
        count = sum(weight.numel() for weight in layer.weights)
        sensitivities.append(LayerSensitivity(layer.name, count, kept, bits))
    return sensitivities


def _with(
    weights: Sequence[nn.Parameter], change: Callable[[Tensor, T], Tensor], level: T, score: Score
) -> float:
    saved = [weight.detach().clone() for weight in weights]
    for weight in weights:
        weight.copy_(change(weight.detach(), level))
    try:
        return score()
    finally:
        for weight, kept in zip(weights, saved, strict=True):
            weight.copy_(kept)


def _pruned(weight: Tensor, keep: float) -> Tensor:
    return weight * largest(weight.abs(), count_of(keep, weight.numel()))


def _shared(weight: Tensor, bits: int) -> Tensor:
    codes, values = share_values(weight, bits, "density", torch.Generator())
    return values.to(weight.dtype)[codes.long()].to(weight.device)


def layers_of(network: nn.Module, prunes_biases: bool, shares_biases: bool) -> list[SizedLayer]:
    """Return each layer's weights, and biases if a scheme prunes or shares them."""
    named = dict(network.named_parameters())
    weights: dict[str, list[nn.Parameter]] = {}
    for name in pruned_weights(named, PruneConfig(keep={"*": 0.5}))[0]:
        weights.setdefault(name.rpartition(".")[0], []).append(named[name])
    layers = [SizedLayer(name, tensors) for name, tensors in weights.items()]
    if prunes_biases or shares_biases:
        keeps = KEEPS if prunes_biases else ()
        bits = BITS if shares_biases else ()
        layers += [
            SizedLayer(name, [parameter], keeps, bits)
            for name, parameter in named.items()
            if name.endswith(BIAS) and parameter.any()
        ]
    return layers
