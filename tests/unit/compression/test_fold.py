"""BatchNorm folded into its weight and bias."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firecaffe.compression.prune_and_share import fold_normalization


def test_outputs_agree_to_rounding_and_folding_twice_changes_nothing() -> None:
    torch.manual_seed(2)
    norm, plain = nn.BatchNorm2d(8, eps=1e-3), nn.BatchNorm1d(8, affine=False)
    with torch.no_grad():
        for each in (norm.weight, norm.bias, norm.running_mean, plain.running_mean):
            assert isinstance(each, Tensor)
            each.normal_()
        norm.running_var.uniform_(1e-4, 3)  # type: ignore[union-attr]
    untracked = nn.BatchNorm1d(8, track_running_stats=False)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.Flatten(), plain, untracked).eval()
    before, images = copy.deepcopy(net), torch.randn(5, 3, 3, 3)
    assert fold_normalization(net) == ["1"]
    # The last layer takes any shift away.
    torch.testing.assert_close(net[:4](images), before[:4](images), rtol=1e-5, atol=1e-5)
    after, state = copy.deepcopy(net.state_dict()), before.state_dict()
    changed = {name for name in state if not torch.equal(after[name], state[name])}
    assert changed == {f"1.{name}" for name in ("weight", "bias", "running_mean", "running_var")}
    assert not after["1.running_mean"].any()
    assert torch.equal(after["1.running_var"], torch.full((8,), 1 - 1e-3))
    fold_normalization(net)
    for name, tensor in net.state_dict().items():
        torch.testing.assert_close(tensor, after[name], rtol=1e-7, atol=0)


@pytest.mark.parametrize("eps", [1e-5, 1e-3, 1.001e-5, 3e-7, 0.0])
def test_what_is_left_is_exactly_a_scale_and_a_shift(eps: float) -> None:
    norm = nn.BatchNorm2d(64, eps=eps).eval()
    norm.running_var.uniform_(0.1, 4)  # type: ignore[union-attr]
    fold_normalization(nn.Sequential(norm))
    images = torch.randn(2, 64, 7, 5)
    weight, bias = (each.detach().double()[:, None, None] for each in (norm.weight, norm.bias))
    expected = images.double() * weight + bias
    torch.testing.assert_close(norm(images).detach(), expected.float(), rtol=1e-7, atol=0)
    assert torch.equal(F.relu(norm(images)) > 0, expected > 0)


def test_layers_that_share_weight_and_bias_are_left() -> None:
    one, other, alone = (nn.BatchNorm1d(4) for _ in range(3))
    other.weight, other.bias = one.weight, one.bias
    net = nn.Sequential(one, nn.ReLU(), other, alone)
    net(torch.randn(16, 4) * 3 + 1)
    before, values = copy.deepcopy(net.eval()), torch.randn(5, 4)
    assert fold_normalization(net) == ["3"]
    torch.testing.assert_close(net(values), before(values))
