"""First weights that are drawn without room for all of them, against those of a whole network."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from firecaffe.models.drawing import follow, named_tensors
from firecaffe.models.known_networks import MODELS


class Odd(nn.Module):
    """Weights in all ways: filled twice, tied, views of one vector, made of others, of no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(40, 50), nn.Linear(50, 40)
        self.second.weight = nn.Parameter(torch.randn(40, 50) / 7)
        self.words = nn.Embedding(50, 40, padding_idx=3)
        self.recurrent = nn.GRU(20, 30)
        self.copy = nn.Parameter(self.first.weight.detach().clone() * 2)
        self.tied = nn.Linear(40, 50, bias=False)
        self.tied.weight = self.first.weight
        self.mask: Tensor
        self.register_buffer("mask", torch.tril(torch.ones(50, 50)))
        flat = torch.empty(2000).uniform_()
        self.front, self.back = nn.Parameter(flat[:800].view(8, 100)), nn.Parameter(flat[800:])
        nn.init.kaiming_normal_(self.first.weight)
        self.first.weight.data.mul_(3)
        self.norm = nn.BatchNorm2d(500)
        self.plain = torch.ones(300)


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return make()


NAMES = ("googlenet_small_bn", "squeezenet1_1", "resnet18")
BUILDS = {name: partial(MODELS[name].build, num_classes=10, in_channels=3) for name in NAMES}
NETWORKS: dict[str, Callable[[], nn.Module]] = {"odd": Odd, **BUILDS}


@pytest.mark.parametrize("name", NETWORKS)
def test_every_tensor_is_that_of_the_whole_network(name: str) -> None:
    make = partial(made, NETWORKS[name])
    expected = dict(named_tensors(make()))
    after = torch.get_rng_state()
    drawing = follow(make)
    assert drawing is not None
    assert after.equal(torch.get_rng_state())  # to follow draws nothing
    found: dict[str, Tensor] = {}
    whole = list(expected)[::2]
    network = drawing.draw(whole, lambda name, tensor: found.update({name: tensor.clone()}))
    assert network is not None
    assert after.equal(torch.get_rng_state())
    assert list(found) == drawing.order
    assert found.keys() == expected.keys()
    for name, tensor in named_tensors(network):
        assert found[name].equal(expected[name]), name
        assert (tensor.shape, tensor.dtype) == (expected[name].shape, expected[name].dtype)
        if name in whole:
            assert tensor.equal(expected[name]), name
        else:
            assert tensor.untyped_storage().nbytes() == tensor.itemsize, name


def truncated() -> nn.Module:
    """Draws again what is too large."""
    layer = nn.Linear(40, 50)
    nn.init.trunc_normal_(layer.weight)
    return layer


def shaped_by_numbers() -> nn.Module:
    return nn.Linear(40, 50 if torch.rand(()).item() < 2 else 60)


def on_the_cpu() -> nn.Module:
    layer = nn.Linear(40, 50)
    layer.weight = nn.Parameter(torch.randn(50, 40, device="cpu"))
    return layer


@pytest.mark.parametrize("make", [truncated, shaped_by_numbers, on_the_cpu])
def test_a_network_that_cannot_be_followed_has_no_drawing(make: Callable[[], nn.Module]) -> None:
    drawing = follow(partial(made, make))
    assert drawing is None or drawing.draw([], lambda name, tensor: None) is None


def test_what_taking_raises_is_raised() -> None:
    drawing = follow(Odd)

    def take(name: str, tensor: Tensor) -> None:
        raise ValueError(name)

    assert drawing is not None
    with pytest.raises(ValueError, match=r"second\.weight"):
        drawing.draw([], take)
