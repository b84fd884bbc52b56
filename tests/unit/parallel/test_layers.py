"""Each layer of the networks in parts, against the layer that is not cut, in float64."""

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from firecaffe.errors import RecipeError
from firecaffe.models.known_networks import build_model
from firecaffe.parallel.cut import cut
from firecaffe.parallel.split_kinds import SPLITS
from tests.unit.parallel.alone import compare, split_copy

NETWORKS = ("alexnet", "vgg16", "googlenet", "resnet18", "resnet50", "squeezenet1_1")


def layers_of(network: str) -> set[tuple[Any, ...]]:
    """The shapes of its layers, the wide ones made narrower."""
    with torch.device("meta"):
        model = build_model(network)
    found: set[tuple[Any, ...]] = set()
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            found.add((nn.Linear, narrow(layer.in_features), narrow(layer.out_features)))
        if isinstance(layer, nn.Conv2d):
            sizes = (narrow(each, layer.groups) for each in (layer.in_channels, layer.out_channels))
            shape = layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.groups
            found.add((nn.Conv2d, *sizes, *shape))
    return found


def narrow(size: int, groups: int = 1) -> int:
    """Odd numbers too, if groups allow it."""
    return size if size <= 16 else (size // 16 // groups + 1) * groups


def all_layers() -> list[tuple[Any, ...]]:
    return sorted(set().union(*map(layers_of, NETWORKS)), key=str)


def made(kind: Any, inputs: int, outputs: int, *shape: Any) -> tuple[nn.Module, torch.Tensor]:
    """The layer, and inputs for two or more places of its outputs."""
    torch.manual_seed(0)
    layer = kind(inputs, outputs, *shape).double()
    if kind is nn.Linear:
        return layer, torch.randn(3, inputs).double()
    rows, columns = (
        max(1, each * (size - 1) + 1 + step - 2 * pad)
        for size, step, pad, each in zip(*shape[:4], strict=True)
    )
    return layer, torch.randn(2, inputs, rows, columns + shape[1][1]).double()


@pytest.mark.parametrize("word", ["neurons", "inputs", "filters", "channels"])
def test_each_layer_of_our_networks_in_one_to_four_parts(word: str) -> None:
    compared = refused = 0
    for kind, *sizes in all_layers():
        if kind not in SPLITS[word]:
            continue
        layer, x = made(kind, *sizes)
        groups = sizes[6] if kind is nn.Conv2d else 1
        places = {"neurons": sizes[1], "filters": sizes[1]}.get(word, sizes[0])
        for num_parts in range(1, 5):
            if num_parts > (groups if groups > 1 else places):
                refused += 1
                with pytest.raises(RecipeError, match=f"0 has .* fewer than {num_parts} parts"):
                    split_copy(nn.Sequential(layer), {"0": word}, num_parts)
                continue
            compare(nn.Sequential(layer), {"0": word}, num_parts, x)
            compared += 1
    assert compared > (12 if word in ("neurons", "inputs") else 200)
    # Two groups of filters, three channels of images.
    assert bool(refused) == (word in ("filters", "channels"))


ODD = [
    nn.Conv2d(7, 5, 3, padding=(2, 1), stride=(2, 1), dilation=(1, 2), bias=False),
    nn.Conv2d(4, 4, 3, padding="same", padding_mode="reflect"),
    nn.Conv2d(6, 6, 3, groups=6),
    nn.Conv2d(10, 15, (3, 1), groups=5, padding_mode="circular", padding=1),
]


@pytest.mark.parametrize("layer", ODD, ids=str)
@pytest.mark.parametrize("word", ["filters", "channels"])
def test_odd_convolutions(layer: nn.Conv2d, word: str) -> None:
    most = layer.groups if layer.groups > 1 else 4
    for num_parts in range(1, most + 1):
        x = torch.randn(2, layer.in_channels, 9, 8).double()
        compare(nn.Sequential(copy.deepcopy(layer).double()), {"0": word}, num_parts, x)


def test_one_filter_a_part_and_images_without_a_batch() -> None:
    for word, num_parts in (("filters", 5), ("channels", 3)):
        layer = nn.Conv2d(3, 5, 3).double()
        compare(nn.Sequential(layer), {"0": word}, num_parts, torch.randn(3, 8, 8).double())


def test_linear_of_more_dimensions() -> None:
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)).double()
    x = torch.randn(2, 3, 5, 6).double()
    compare(model, {"0": "neurons", "2": "inputs"}, 3, x)


@pytest.mark.parametrize(
    ("first", "norm", "shape", "word"),
    [
        (nn.Conv2d(3, 7, 3), nn.BatchNorm2d(7), (4, 3, 6, 6), "filters"),
        (nn.Linear(3, 7), nn.BatchNorm1d(7), (4, 3), "neurons"),
        (nn.Conv2d(3, 7, 3), nn.BatchNorm2d(7, affine=False), (4, 3, 6, 6), "filters"),
        (nn.Conv2d(3, 7, 3), nn.BatchNorm2d(7, momentum=None), (4, 3, 6, 6), "filters"),
        (nn.Conv2d(3, 7, 3), nn.BatchNorm2d(7, bias=False), (4, 3, 6, 6), "filters"),
    ],
)
def test_batch_norm_is_over_all_samples(
    first: nn.Module, norm: nn.Module, shape: tuple[int, ...], word: str
) -> None:
    model = nn.Sequential(first, norm).double()
    x = torch.randn(shape).double()
    split = compare(model, {"*": word}, 3, x)
    split.eval(), model.eval()
    torch.testing.assert_close(split(x), model(x), rtol=1e-10, atol=1e-12)


def test_a_frozen_parameter_stays_frozen() -> None:
    model = nn.Sequential(nn.Linear(4, 6))
    model[0].weight.requires_grad_(False)
    split = split_copy(model, {"0": "neurons"}, 2)
    trained = [name for name, each in split.named_parameters() if each.requires_grad]
    assert trained == ["module.0.parts.0.bias", "module.0.parts.1.bias"]


def test_parts_differ_by_one_at_most() -> None:
    assert cut(10, 4) == (0, 2, 5, 7, 10)
    for size in range(1, 20):
        for num_parts in range(1, size + 1):
            ends = cut(size, num_parts)
            lengths = {b - a for a, b in pairwise(ends)}
            assert ends[-1] == size
            assert 0 < min(lengths) <= max(lengths) <= min(lengths) + 1
