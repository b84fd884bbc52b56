"""BatchNorm folded into its weight and bias."""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firecaffe.compression.selected_layers import fold_normalization


def network() -> nn.Sequential:
    torch.manual_seed(2)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8, eps=1e-3),
        nn.Flatten(),
        nn.BatchNorm1d(8, affine=False),
        nn.BatchNorm1d(8, track_running_stats=False),
    )
    norm = net[1]
    assert isinstance(norm.running_var, Tensor)
    assert isinstance(norm.running_mean, Tensor)
    with torch.no_grad():
        for each in (norm.weight, norm.bias, norm.running_mean, net[3].running_mean):
            assert isinstance(each, Tensor)
            each.normal_()
        norm.running_var.uniform_(1e-4, 3)
    return net.eval()


def test_outputs_agree_to_rounding() -> None:
    net = network()
    before, images = copy.deepcopy(net), torch.randn(5, 3, 3, 3)
    assert fold_normalization(net) == ["1"]
    torch.testing.assert_close(net(images), before(images), rtol=1e-5, atol=1e-5)
    after, state = net.state_dict(), before.state_dict()
    changed = {name for name in state if not torch.equal(after[name], state[name])}
    assert changed == {f"1.{name}" for name in ("weight", "bias", "running_mean", "running_var")}
    assert not after["1.running_mean"].any()
    assert torch.equal(after["1.running_var"], torch.full((8,), 1 - 1e-3))


def test_what_is_left_is_exactly_a_scale_and_a_shift() -> None:
    for eps in (1e-5, 1e-3, 1.001e-5, 3e-7, 0.0):
        net = nn.Sequential(nn.BatchNorm2d(64, eps=eps)).eval()
        with torch.no_grad():
            net[0].running_var.uniform_(0.1, 4)  # type: ignore[operator]
        fold_normalization(net)
        weight, bias = net[0].weight, net[0].bias
        assert isinstance(weight, Tensor)
        assert isinstance(bias, Tensor)
        images = torch.randn(2, 64, 7, 5)
        expected = images.double() * weight.double()[:, None, None] + bias[:, None, None].double()
        torch.testing.assert_close(net(images), expected.float(), rtol=1e-7, atol=0)
        assert torch.equal(F.relu(net(images)) > 0, expected > 0)


def test_folding_twice_changes_nothing() -> None:
    net = network()
    fold_normalization(net)
    once = copy.deepcopy(net.state_dict())
    fold_normalization(net)
    for name, tensor in net.state_dict().items():
        torch.testing.assert_close(tensor, once[name], rtol=1e-7, atol=0)
