"""The weights that patterns of layers' names select, and batch norms folded into them."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from firecaffe.compression.config import PruneConfig, ShareConfig
from firecaffe.errors import RecipeError

T = TypeVar("T")

BIAS = ".bias"


def pruned_weights(
    network: Mapping[str, nn.Parameter], words: PruneConfig
) -> tuple[dict[str, float], dict[str, float]]:
    """Return shares to keep, and thresholds, by weight. Raises RecipeError naming the layer."""
    keep = _matching(network, "prune.keep", words.keep)
    threshold = _matching(network, "prune.threshold", words.threshold)
    for name in keep.keys() & threshold.keys():
        raise RecipeError(
            f"prune.keep and prune.threshold both match {_layer(name)}; leave it out of one of them"
        )
    frozen = {name for name, parameter in network.items() if not parameter.requires_grad}
    keep = {name: share for name, share in keep.items() if share < 1 or name not in frozen}
    _refuse("prune.keep", frozen & keep.keys(), "or say {!r} = 1 after it")
    _refuse("prune.threshold", frozen & threshold.keys())
    return keep, threshold


def shared_weights(network: Mapping[str, nn.Parameter], words: ShareConfig) -> dict[str, int]:
    """Return the bits of each shared weight. Raises RecipeError naming the layer."""
    bits = _matching(network, "share.bits", words.bits)
    frozen = {name for name, parameter in network.items() if not parameter.requires_grad}
    _refuse("share.bits", frozen & bits.keys())
    return bits


def _matching(
    network: Mapping[str, nn.Parameter], word: str, patterns: Mapping[str, T]
) -> dict[str, T]:
    # Vectors that are no biases belong to normalization, and are never selected.
    biases = [name for name in network if name.endswith(BIAS)]
    weights = [
        name
        for name, parameter in network.items()
        if parameter.ndim > 1 and _layer(name) and "bias" not in name.rpartition(".")[2]
    ]
    values: dict[str, T] = {}
    for pattern, value in patterns.items():
        if pattern.endswith(BIAS):
            matching = [name for name in biases if fnmatchcase(name, pattern)]
        else:
            matching = [name for name in weights if fnmatchcase(_layer(name), pattern)]
        if not matching:
            raise RecipeError(f"{word} has {pattern!r}, {_no_match(pattern, weights)}")
        values |= dict.fromkeys(matching, value)
    return {name: values[name] for name in network if name in values}


def _layer(name: str) -> str:
    return name.rpartition(".")[0]


def _no_match(pattern: str, weights: list[str]) -> str:
    if pattern.endswith(BIAS):
        return "which no bias matches; biases are called as their layers, and then .bias"
    layers = list(dict.fromkeys(map(_layer, weights)))
    if any(layer.startswith(f"{pattern}.") for layer in layers):
        return f"which is no layer but has some; say {pattern + '.*'!r}"
    if not layers:
        return "but the network has no layer with weights"
    shown = ", ".join(layers[:4]) + (" …" if len(layers) > 4 else "")
    return f"which no layer with weights matches; they are called {shown}"


def _refuse(word: str, frozen: set[str], would: str = "") -> None:
    if frozen:
        layer = _layer(min(frozen))
        also = f", {would.format(layer)}" if would else ""
        raise RecipeError(
            f"{word} matches {layer}, which model.freeze keeps from training; leave it out of the "
            f"pattern{also}"
        )


@torch.no_grad()
def fold_normalization(network: nn.Module) -> list[str]:
    """Fold each BatchNorm's statistics into weight and bias; return the layers' names.

    The mean becomes 0 and the variance 1 - eps, so that a file needs no numbers for them. Outputs
    in evaluation are equal up to rounding. Do not train the network further. A BatchNorm without
    statistics, or without weight and bias, is not changed.
    """
    folded = []
    for name, layer in network.named_modules():
        if not isinstance(layer, _BatchNorm) or not layer.affine:
            continue
        mean, var = layer.running_mean, layer.running_var
        if mean is None or var is None:
            continue
        scale = layer.weight.double() / (var.double() + layer.eps).sqrt()
        layer.bias.copy_(layer.bias.double() - mean.double() * scale)
        layer.weight.copy_(scale)
        mean.zero_()
        var.fill_(1 - layer.eps)
        folded.append(name)
    return folded
