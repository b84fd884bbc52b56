"""Each layer of the networks in parts, against the layer that is not cut, in float64; and parts
with their neighbours' elements, against windows of the whole tensor.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from firecaffe.caffe.local_response_norm import LocalResponseNorm
from firecaffe.errors import RecipeError
from firecaffe.models.known_networks import build_model
from firecaffe.parallel.cut import cut
from firecaffe.parallel.rows import Windows, with_halos
from firecaffe.parallel.split_kinds import SPLITS
from firecaffe.parallel.tensor import TensorInParts
from tests.unit.parallel.alone import compare, group_of, split_copy

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


def test_parts_differ_by_one_at_most() -> None:
    assert cut(10, 4) == (0, 2, 5, 7, 10)
    for size in range(1, 20):
        for num_parts in range(1, size + 1):
            ends = cut(size, num_parts)
            lengths = {b - a for a, b in pairwise(ends)}
            assert ends[-1] == size
            assert 0 < min(lengths) <= max(lengths) <= min(lengths) + 1


CUT = (0, 3, 4, 8)


@pytest.mark.parametrize(
    "windows",
    [
        (range(3), range(3, 4), range(4, 8)),  # no halo
        (range(4), range(2, 5), range(3, 8)),
        (range(8), range(1, 8), range(2, 7)),  # over a whole part
        (range(2), range(2, 3), range(5, 8)),  # elements that nobody sees
        (range(5, 8), range(1), range(4)),  # of others alone
    ],
    ids=str,
)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_windows_and_their_gradients(windows: Windows, dim: int) -> None:
    torch.manual_seed(0)
    whole = torch.randn(2, 3, 8).double().movedim(2, dim).contiguous().requires_grad_()
    lengths = [stop - start for start, stop in pairwise(CUT)]
    seen = with_halos(group_of(3), whole.split_with_sizes(lengths, dim), CUT, windows, dim)
    expected = [whole.narrow(dim, each.start, len(each)) for each in windows]
    gradients = [torch.randn_like(each) for each in expected]
    for found, each in zip(seen, expected, strict=True):
        assert torch.equal(found, each)
    [found_gradient] = torch.autograd.grad(seen, whole, gradients)
    [expected_gradient] = torch.autograd.grad(expected, whole, gradients)
    torch.testing.assert_close(found_gradient, expected_gradient, rtol=1e-12, atol=1e-12)


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
