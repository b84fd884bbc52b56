"""What a network loses if one layer alone is pruned, or shares its values; nothing is trained."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from firecaffe.compression.config import PruneConfig
from firecaffe.compression.layers import BIAS, pruned_weights
from firecaffe.compression.prune import count_of, largest
from firecaffe.compression.share import share
from firecaffe.shrink.layers import BITS, KEEPS, LayerSensitivity

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
        codes, values = share(weight, bits, "density", torch.Generator())
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
