"""Layers in parts of weights or of rows, in one process: against the whole layer, in float64."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firecaffe.caffe.local_response_norm import LocalResponseNorm
from firecaffe.errors import RecipeError
from firecaffe.models.alexnet import alexnet
from firecaffe.models.known_networks import build_model
from firecaffe.models.resnet import BasicBlock
from firecaffe.parallel.cut import cut
from firecaffe.parallel.split_kinds import SPLITS
from firecaffe.parallel.tensor import TensorInParts
from tests.kit.training_modules import Composed
from tests.unit.parallel.alone import compare, split_copy

# --- weights --------------------------------------------------------------------------------------

NETWORKS = ("alexnet", "vgg16", "googlenet", "resnet18", "resnet50", "squeezenet1_1")


def layers_of(network: str) -> Iterator[tuple[Any, ...]]:
    """The shapes of its layers; wide ones get one of two widths, even or odd."""
    with torch.device("meta"):
        model = build_model(network)
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            yield nn.Linear, narrow(layer.in_features), narrow(layer.out_features)
        if isinstance(layer, nn.Conv2d):
            sizes = (narrow(each, layer.groups) for each in (layer.in_channels, layer.out_channels))
            shape = layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.groups
            yield nn.Conv2d, *sizes, *shape


def narrow(size: int, groups: int = 1) -> int:
    """An even or an odd size, if groups allow it."""
    return size if size <= 16 else (4 + size // 16 % 2) * groups


ALL_LAYERS = sorted({shape for name in NETWORKS for shape in layers_of(name)}, key=str)


def made(kind: Any, inputs: int, outputs: int, *shape: Any) -> tuple[nn.Module, tuple[int, ...]]:
    """The layer, and the shape of inputs for two or more places of its outputs."""
    torch.manual_seed(0)
    layer = kind(inputs, outputs, *shape)
    if kind is nn.Linear:
        return layer, (3, inputs)
    rows, columns = (
        max(1, each * (size - 1) + 1 + step - 2 * pad)
        for size, step, pad, each in zip(*shape[:4], strict=True)
    )
    return layer, (2, inputs, rows, columns + shape[1][1])


@pytest.mark.parametrize("word", ["neurons", "inputs", "filters", "channels"])
def test_each_layer_of_our_networks_in_one_to_four_parts(word: str) -> None:
    compared = refused = 0
    for kind, *sizes in ALL_LAYERS:
        if kind not in SPLITS[word]:
            continue
        layer, shape = made(kind, *sizes)
        groups = sizes[6] if kind is nn.Conv2d else 1
        places = {"neurons": sizes[1], "filters": sizes[1]}.get(word, sizes[0])
        for num_parts in range(1, 5):
            if num_parts > (groups if groups > 1 else places):
                refused += 1
                with pytest.raises(RecipeError, match=f"0 has .* fewer than {num_parts} parts"):
                    split_copy(nn.Sequential(layer), {"0": word}, num_parts)
                continue
            compare(nn.Sequential(layer), {"0": word}, num_parts, shape)
            compared += 1
    assert compared > (3 if word in ("neurons", "inputs") else 60)
    # Two groups of filters, three channels of images.
    assert bool(refused) == (word in ("filters", "channels"))


ODD_CONVOLUTIONS = [
    nn.Conv2d(7, 5, 3, padding=(2, 1), stride=(2, 1), dilation=(1, 2), bias=False),
    nn.Conv2d(4, 4, 3, padding="same", padding_mode="reflect"),
    nn.Conv2d(6, 6, 3, groups=6),
    nn.Conv2d(10, 15, (3, 1), groups=5, padding_mode="circular", padding=1),
]


@pytest.mark.parametrize("layer", ODD_CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("word", ["filters", "channels"])
def test_odd_convolutions_by_weights(layer: nn.Conv2d, word: str) -> None:
    most = layer.groups if layer.groups > 1 else 4
    for num_parts in range(1, most + 1):
        for batch in ((2,), ()):
            compare(nn.Sequential(layer), {"0": word}, num_parts, (*batch, layer.in_channels, 9, 8))


@pytest.mark.parametrize(
    "norm",
    [
        *(nn.BatchNorm1d(7), nn.BatchNorm2d(7), nn.BatchNorm2d(7, affine=False)),
        *(nn.BatchNorm2d(7, momentum=None), nn.BatchNorm2d(7, bias=False)),
    ],
    ids=str,
)
def test_batch_norm_is_over_all_samples(norm: nn.Module) -> None:
    is_flat = isinstance(norm, nn.BatchNorm1d)
    model = nn.Sequential(nn.Linear(3, 7) if is_flat else nn.Conv2d(3, 7, 3), norm)
    x = torch.randn((4, 3) if is_flat else (4, 3, 6, 6)).double()
    split = compare(model, {"*": "neurons" if is_flat else "filters"}, 3, x)
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


@pytest.mark.parametrize("norm", [nn.LocalResponseNorm, LocalResponseNorm])
@pytest.mark.parametrize("size", [1, 2, 5, 13])
def test_local_response_normalization_in_one_to_four_parts(norm: type, size: int) -> None:
    """In four parts there are 2, 2, 2 and 1 channels: fewer than a halo may have."""
    for num_parts in range(1, 5):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(2, 7, 3), norm(size, 0.5, 0.7), nn.Tanh())
        split = compare(model, {"0": "filters"}, num_parts, (3, 2, 5, 6))
        assert isinstance(split.module(torch.randn(3, 2, 5, 6).double()), TensorInParts)


def test_linear_layers_of_more_dimensions() -> None:
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4))
    compare(model, {"0": "neurons", "2": "inputs"}, 3, (2, 3, 5, 6))
    rows = nn.Sequential(nn.Linear(4, 7), nn.Flatten(2), nn.LocalResponseNorm(3))
    compare(rows, {"0": "neurons"}, 3, (2, 5, 4))


# --- rows of images -------------------------------------------------------------------------------

CONVOLUTIONS = [shape for shape in ALL_LAYERS if shape[0] is nn.Conv2d]

with torch.device("meta"):
    LAYERS = [layer for name in NETWORKS for layer in build_model(name).modules()]
POOLS_OF_NETWORKS = {
    str(layer): layer for layer in LAYERS if isinstance(layer, nn.MaxPool2d | nn.AvgPool2d)
}


def rows_for(outputs: int, kernel: int, stride: int, padding: int) -> int:
    return max(1, (outputs - 1) * stride + kernel - 2 * padding)


@pytest.mark.parametrize("num_parts", [1, 2, 3])
def test_each_convolution_of_our_networks(num_parts: int) -> None:
    """On images of as few rows as do, one a part, and of more that leave some over."""
    seen = set()
    for _, inputs, outputs, *shape in CONVOLUTIONS:
        groups = shape[4]
        if (*shape,) in seen:
            continue  # another one by channels alone
        seen.add((*shape,))
        torch.manual_seed(0)
        layer = nn.Conv2d(min(inputs, 2 * groups), min(outputs, 2 * groups), *shape)
        kernel, stride, padding = (each[0] for each in shape[:3])
        for more in (0, 1, 2 * stride + 1):
            rows = rows_for(num_parts, kernel, stride, padding) + more
            if rows >= num_parts:
                sizes = 2, layer.in_channels, rows, kernel + stride
                compare(nn.Sequential(layer), {"0": "rows"}, num_parts, sizes)
    assert len(seen) >= 8


ODD = [
    nn.Conv2d(4, 6, (5, 3), (3, 1), (2, 0), (2, 1), 2, bias=False),
    nn.Conv2d(3, 2, (4, 3), padding="same", dilation=(1, 3)),
    nn.Conv2d(3, 2, 3, padding="valid"),
    nn.Conv2d(3, 2, 2, 4),  # rows that nobody sees
]


@pytest.mark.filterwarnings("ignore:Using padding=.same. with even kernel lengths")
@pytest.mark.parametrize("layer", ODD, ids=str)
@pytest.mark.parametrize("rows", [11, 12])
def test_odd_convolutions(layer: nn.Conv2d, rows: int) -> None:
    for num_parts in (1, 2, 3):
        compare(nn.Sequential(layer), {"0": "rows"}, num_parts, (2, layer.in_channels, rows, 7))


def test_parts_that_see_padding_alone_and_images_without_a_batch() -> None:
    padded = nn.Sequential(nn.Conv2d(3, 2, 1, padding=4))
    for rows in (3, 4, 7):
        compare(padded, {"0": "rows"}, 3, (2, 3, rows, 4))
    compare(nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2)), {"0": "rows"}, 3, (3, 11, 8))


POOLS = [
    *POOLS_OF_NETWORKS.values(),
    nn.MaxPool2d(3, 2, padding=1, ceil_mode=True),
    nn.MaxPool2d((2, 3), (3, 1), dilation=(2, 1)),
    nn.MaxPool2d(2, 3, ceil_mode=True),
    nn.AvgPool2d(3, 2, padding=1, ceil_mode=True),
    nn.AvgPool2d(3, 2, padding=1, ceil_mode=True, count_include_pad=False),
    nn.AvgPool2d((4, 3), (3, 2), (2, 1), divisor_override=5),
    nn.AvgPool2d((4, 3), (3, 2), (2, 1), count_include_pad=False),
]


@pytest.mark.parametrize("pool", POOLS, ids=str)
def test_pools_go_on_over_rows(pool: nn.Module) -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), pool, nn.Tanh()).double()
    for num_parts in (1, 3, 4):
        for rows in (5, 12, 13, 14, 17):
            x = torch.randn(2, 2, rows, 9).double()
            split = compare(model, {"0": "rows"}, num_parts, x)
            inner = split.module(x)
            assert isinstance(inner, TensorInParts) == (model(x).shape[2] >= num_parts)


def functional(_: Any, x: Tensor) -> Tensor:
    y = F.max_pool2d(F.relu(x), 2, ceil_mode=True) + F.avg_pool2d(x, (2, 2), ceil_mode=True)
    return F.dropout(y * 2, 0.3)


def with_between(between: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    layers = {"first": nn.Conv2d(2, 6, 3, padding=1), "last": nn.Conv2d(6, 3, 3)}
    return Composed(lambda m, x: m.last(m.between(m.first(x))), **layers, between=between)


@pytest.mark.parametrize(
    "between",
    [
        *(Composed(functional), nn.BatchNorm2d(6), nn.LocalResponseNorm(5, 0.5)),
        *(LocalResponseNorm(5, 0.5), nn.Sequential(nn.ReLU(inplace=True), nn.Dropout())),
        *(nn.AdaptiveAvgPool2d(7), nn.Upsample(scale_factor=2), nn.Softmax(2)),
        nn.Sequential(BasicBlock(6, 8, 2), BasicBlock(8, 6, 1)),
        nn.MaxPool2d(2, return_indices=False),
    ],
    ids=str,
)
def test_what_stands_between_layers_over_rows(between: Any) -> None:
    model = with_between(between)
    for num_parts in (1, 3):
        for last in ({"last": "rows"}, {}, {"last": "channels"}):
            compare(model, {"first": "rows", **last}, num_parts, (3, 2, 13, 9))
        compare(model, {"first": "filters", "last": "rows"}, num_parts, (3, 2, 13, 9))


@pytest.mark.parametrize(
    "norm",
    [
        *(nn.BatchNorm2d(6), nn.BatchNorm2d(6, affine=False), nn.BatchNorm2d(6, bias=False)),
        *(nn.BatchNorm2d(6, momentum=None), nn.BatchNorm2d(6, track_running_stats=False)),
    ],
    ids=str,
)
def test_batch_norm_is_over_all_rows(norm: nn.Module) -> None:
    model, x = with_between(norm), torch.randn(3, 2, 9, 7).double() * 3 + 5
    for num_parts in (1, 4):
        split = compare(model, {"*": "rows"}, num_parts, x)
        split.eval(), model.eval()
        torch.testing.assert_close(split(x), model(x), rtol=1e-10, atol=1e-12)
        compare(model, {"*": "rows"}, num_parts, x)
        model.train()


def test_rows_then_neurons_on_alexnets_features() -> None:
    with torch.device("meta"):
        layers: list[Any] = list(alexnet().features)
    torch.manual_seed(0)
    for number, layer in enumerate(layers):
        if isinstance(layer, nn.Conv2d):
            shape: Any = layer.kernel_size, layer.stride, layer.padding, 1, layer.groups
            layers[number] = nn.Conv2d(min(layer.in_channels, 4), 4, *shape)
    small = nn.Sequential(nn.Sequential(*layers), nn.Flatten(), nn.Linear(4 * 3 * 2, 5))
    compare(small, {"0.*": "rows", "2": "neurons"}, 3, (1, 3, 115, 99))


def test_too_few_rows_are_told_with_the_layer() -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.ReLU(), nn.Conv2d(2, 2, 3, 2))
    split = split_copy(model, {"*": "rows"}, 4)
    with pytest.raises(RecipeError, match="2 makes 3 rows of 7, fewer than 4 parts; leave it out"):
        split(torch.randn(1, 2, 7, 7))
    with pytest.raises(RecipeError, match="0 makes 3 rows of 3, fewer than 4 parts"):
        split(torch.randn(1, 2, 3, 7))
    mirrored = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"))
    with pytest.raises(RecipeError, match="0 has padding_mode 'reflect'; by rows"):
        split_copy(mirrored, {"0": "rows"}, 2)
