"""Layers replaced by two of lower rank: a weight matrix as the product of two thinner ones.

A fully connected layer becomes one with `rank` outputs, and one from these. A convolution becomes
one of equal size, stride and padding with `rank` outputs, and a 1 x 1 convolution. The first layer
has no bias. The singular value decomposition gives the nearest product (Eckart and Young 1936).

Sources: Denton et al. 2014, arXiv 1404.0736 (fully connected layers); Zhang, Zou, He and Sun 2015,
arXiv 1505.06798, section 3.1 (convolutions).
"""

from collections import OrderedDict
from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from firecaffe.errors import RecipeError

REDUCE, EXPAND = "reduce", "expand"
"""Names of the two layers within the layer that they replace."""


def make_low_rank(network: nn.Module, ranks: Mapping[str, int]) -> None:
    """Replace each layer whose name matches by two with fresh weights; see `chosen_ranks`."""
    for name, rank in chosen_ranks(network, ranks).items():
        network.set_submodule(name, _split_layer(network.get_submodule(name), rank))


def low_rank_weights(state: Mapping[str, Tensor], ranks: Mapping[str, int]) -> dict[str, Tensor]:
    """Convert a `state_dict` as `make_low_rank` converts the network. Raises RecipeError."""
    converted: dict[str, Tensor] = {}
    for name, tensor in state.items():
        layer, _, kind = name.rpartition(".")
        if layer not in ranks:
            converted[name] = tensor
        elif kind == "weight":
            parts = _factors(layer, tensor, ranks[layer])
            for part, weight in zip((REDUCE, EXPAND), parts, strict=True):
                converted[f"{layer}.{part}.{kind}"] = weight
        else:
            converted[f"{layer}.{EXPAND}.{kind}"] = tensor
    for layer in ranks:
        if f"{layer}.weight" not in state:
            raise RecipeError(f"low rank: there is no {layer}.weight to decompose")
    return converted


def rank_of(weight: Tensor, energy: float) -> int:
    """Return the smallest rank that keeps this share of the sum of squared singular values."""
    squares = torch.linalg.svdvals(_matrix(weight).double()).square()
    kept = squares.cumsum(0) / squares.sum()
    return min(int((kept < energy).sum()) + 1, len(kept))


def _matrix(weight: Tensor) -> Tensor:
    return weight.detach().flatten(1)


def _factors(layer: str, weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    matrix = _matrix(weight)
    _check_rank(layer, rank, min(matrix.shape))
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    roots = values[:rank].sqrt()  # split equally between the two layers
    reduce = (roots[:, None] * right[:rank]).view(rank, *weight.shape[1:])
    expand = (left[:, :rank] * roots).view(len(matrix), rank, *[1] * (weight.ndim - 2))
    dtype = weight.dtype
    return reduce.to(dtype).contiguous(), expand.to(dtype).contiguous()


def _split_layer(layer: nn.Module, rank: int) -> nn.Sequential:
    weight = layer.weight
    assert isinstance(weight, Tensor)
    has_bias = layer.bias is not None
    if isinstance(layer, nn.Linear):
        reduce: nn.Module = nn.Linear(layer.in_features, rank, bias=False)
        expand: nn.Module = nn.Linear(rank, layer.out_features, bias=has_bias)
    else:
        assert isinstance(layer, nn.Conv2d)
        reduce = nn.Conv2d(
            layer.in_channels,
            rank,
            layer.kernel_size,  # type: ignore[arg-type]
            layer.stride,  # type: ignore[arg-type]
            layer.padding,  # type: ignore[arg-type]
            layer.dilation,  # type: ignore[arg-type]
            bias=False,
            padding_mode=layer.padding_mode,
        )
        expand = nn.Conv2d(rank, layer.out_channels, 1, bias=has_bias)
    made = nn.Sequential(OrderedDict([(REDUCE, reduce), (EXPAND, expand)]))
    return made.to(weight.device, weight.dtype)


def chosen_ranks(network: nn.Module, ranks: Mapping[str, int]) -> dict[str, int]:
    """Return ranks by layer; the last match decides. Raises RecipeError (no match, no rank)."""
    layers = {
        name: layer
        for name, layer in network.named_modules(remove_duplicate=False)
        if name and type(layer) in (nn.Linear, nn.Conv2d)
    }
    chosen: dict[str, int] = {}
    for pattern, rank in ranks.items():
        matching = [name for name in layers if fnmatchcase(name, pattern)]
        if not matching:
            shown = ", ".join([*layers][:4]) + (" …" if len(layers) > 4 else "")
            raise RecipeError(
                f"model.low_rank has {pattern!r}, which no Linear or Conv2d of the network "
                f"matches; {f'they are called {shown}' if shown else 'it has none'}"
            )
        chosen |= dict.fromkeys(matching, rank)
    for name, rank in chosen.items():
        _check_layer(network, name, layers[name])
        most = min(_matrix(layers[name].weight).shape)
        _check_rank(name, rank, most)
    return chosen


def _check_layer(network: nn.Module, name: str, layer: nn.Module) -> None:
    if isinstance(layer, nn.Conv2d) and layer.groups > 1:
        raise RecipeError(
            f"model.low_rank matches {name}, a convolution in {layer.groups} groups; leave it out "
            "of the pattern"
        )
    weights = [
        parameter
        for _, other in network.named_modules(remove_duplicate=False)
        for parameter in other._parameters.values()
        if parameter is layer.weight
    ]
    if len(weights) > 1:
        raise RecipeError(
            f"model.low_rank matches {name}, whose weights have another place in the network too; "
            "leave it out of the pattern"
        )


def _check_rank(name: str, rank: int, most: int) -> None:
    if not 1 <= rank <= most:
        raise RecipeError(f"model.low_rank of {name} is {rank}; it must be 1 to {most}")
