"""Parts with their neighbours' elements, in one process: against windows of the whole tensor."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from firecaffe.caffe.local_response_norm import LocalResponseNorm
from firecaffe.cluster.group import Group
from firecaffe.parallel.halo import Windows, with_halos
from firecaffe.parallel.parts import PartGroup
from firecaffe.parallel.tensor import TensorInParts
from tests.unit.parallel.alone import compare

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
    group = PartGroup(Group(0, 1, torch.device("cpu")), 3)
    lengths = [stop - start for start, stop in pairwise(CUT)]
    seen = with_halos(group, whole.split_with_sizes(lengths, dim), CUT, windows, dim)
    expected = [whole.narrow(dim, each.start, len(each)) for each in windows]
    gradients = [torch.randn_like(each) for each in expected]
    for found, each in zip(seen, expected, strict=True):
        assert torch.equal(found, each)
    [found_gradient] = torch.autograd.grad(seen, whole, gradients)
    [expected_gradient] = torch.autograd.grad(expected, whole, gradients)
    torch.testing.assert_close(found_gradient, expected_gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("norm", [nn.LocalResponseNorm, LocalResponseNorm])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13])
def test_local_response_normalization_in_one_to_four_parts(norm: type, size: int) -> None:
    """In four parts there are 2, 2, 2 and 1 channels: fewer than a halo may have."""
    for num_parts in range(1, 5):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(2, 7, 3), norm(size, 0.5, 0.7), nn.Tanh()).double()
        split = compare(model, {"0": "filters"}, num_parts, torch.randn(3, 2, 5, 6).double())
        assert isinstance(split.module(torch.randn(3, 2, 5, 6).double()), TensorInParts)


def test_local_response_normalization_of_rows() -> None:
    model = nn.Sequential(nn.Linear(4, 7), nn.Flatten(2), nn.LocalResponseNorm(3)).double()
    compare(model, {"0": "neurons"}, 3, torch.randn(2, 5, 4).double())
