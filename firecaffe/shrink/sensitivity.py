"""What a network loses if one layer alone is pruned, or shares its values; nothing is trained."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from firecaffe.compression.config import PruneConfig
from firecaffe.compression.layers import BIAS, pruned_weights
from firecaffe.compression.prune import count_of, largest
from firecaffe.compression.share import share
from firecaffe.shrink.layers import BITS, KEEPS, LayerSensitivity

Score = Callable[[], float]
"""What the network is worth as it is now; more is better."""


@torch.no_grad()
def measure_layers(
    layers: Mapping[str, Sequence[nn.Parameter]],
    score: Score,
    say: Callable[[LayerSensitivity], None] = lambda _: None,
) -> list[LayerSensitivity]:
    """Tries every layer at every level, and leaves the weights as they were.

    layers: the weights of each, by its name. say: told each layer as it is done.
    """
    before = score()
    found = []
    for name, weights in layers.items():
        kept = {keep: before - _with(weights, _pruned(keep), score) for keep in KEEPS}
        bits = {each: before - _with(weights, _shared(each), score) for each in BITS}
        count = sum(each.numel() for each in weights)
        found.append(LayerSensitivity(name, count, kept, bits))
        say(found[-1])
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


def layers_of(network: nn.Module, has_biases: bool) -> dict[str, list[nn.Parameter]]:
    """What can be pruned and shared by itself, by the pattern that means it: each layer's weights
    by the layer's name, and, if asked for, its biases by their own.
    """
    named = dict(network.named_parameters())
    layers: dict[str, list[nn.Parameter]] = {}
    for name in pruned_weights(network, PruneConfig(keep={"*": 0.5}))[0]:
        layers.setdefault(name.rpartition(".")[0], []).append(named[name])
    if has_biases:
        biases = {name: each for name, each in named.items() if name.endswith(BIAS) and each.any()}
        layers |= {name: [each] for name, each in biases.items()}
    return layers
