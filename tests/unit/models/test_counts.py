"""Parameters, MACs and volumes against published figures and figures worked out by hand."""

import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn

from firecaffe.models import MODELS, build_model
from firecaffe.models.googlenet import googlenet, googlenet_bn
from firecaffe.models.layer_costs import Profile, profile


@functools.cache
def of_one_image(name: str) -> Profile:
    with torch.device("meta"):
        network = build_model(name)
    return profile(network, MODELS[name].input_CHW, 1)


# VGG, SqueezeNet, ResNet, googlenet_bn: torchvision's num_params. Others: from the authors' files.
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("lenet", 431_080),
        ("lenet_300_100", 266_610),
        ("cifar10_quick", 145_578),
        ("cifar10_full", 89_578),
        ("nin_cifar", 966_986),
        ("nin", 7_595_176),
        ("alexnet", 60_965_224),
        ("alexnet_ungrouped", 62_378_344),
        ("alexnet_owt", 61_100_840),
        ("caffenet", 60_965_224),
        ("googlenet", 13_378_280),
        ("googlenet_bn", 13_004_888),
        ("vgg16", 138_357_544),
        ("vgg19", 143_667_240),
        # convolutions without biases, a scale and a shift for each of 944 channels, a classifier
        ("vgg_small_bn", 1_166_256 + 2 * 944 + 2_570),
        ("squeezenet1_0", 1_248_424),
        ("squeezenet1_1", 1_235_496),
        ("resnet18", 11_689_512),
        ("resnet50", 25_557_032),
        ("resnet152", 60_192_808),
    ],
)
def test_parameters(name: str, parameters: int) -> None:
    assert of_one_image(name).parameters == parameters


@pytest.mark.parametrize(
    ("build", "parameters"), [(googlenet, 6_998_552), (googlenet_bn, 6_624_904)]
)
def test_parameters_without_heads(build: Callable[..., nn.Module], parameters: int) -> None:
    with torch.device("meta"):
        network = build(aux_logits=False)
    assert profile(network, (3, 224, 224), 1).parameters == parameters


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("lenet", 2.293),
        ("lenet_300_100", 0.266),
        # 5x5x3x32 at 32x32, 5x5x32x32 at 16x16, 5x5x32x64 at 8x8, then 1024 to 64 to 10
        ("cifar10_quick", 12.354),
        ("cifar10_full", 12.298),
        ("nin_cifar", 222.5),
        ("nin", 1100.2),
        ("alexnet", 724.4),
        ("caffenet", 724.4),
        ("googlenet", 1591.0),
        ("vgg19", 19632),
        # torchvision's _ops, in G
        ("vgg16", 15470),
        ("squeezenet1_0", 819),
        ("squeezenet1_1", 349),
        ("resnet18", 1814),
        ("resnet50", 4089),
        ("resnet152", 11514),
    ],
)
def test_forward_macs_of_one_image(name: str, millions: float) -> None:
    assert of_one_image(name).macs / 1e6 == pytest.approx(millions, rel=1e-3)


def test_macs_of_googlenet_bn_without_heads_are_torchvisions() -> None:
    with torch.device("meta"):
        macs = profile(googlenet_bn(aux_logits=False), (3, 224, 224), 1).macs
    assert macs / 1e9 == pytest.approx(1.498, abs=5e-4)


@pytest.mark.parametrize("name", ["nin_small", "googlenet_small_bn"])
def test_small_networks_stay_small(name: str) -> None:
    assert 10e6 < of_one_image(name).macs < 20e6


# FireCaffe's volumes, recomputed: MB of weights, MB of inputs, TFLOP.
@pytest.mark.parametrize(
    ("name", "side", "weights", "data", "tera"),
    [
        ("nin", 224, 30.4, 5793, 6.76),
        ("nin", 227, 30.4, 5895, None),
        ("alexnet", 224, 243.9, 1683, 4.43),
        ("alexnet", 227, 243.9, 1700, None),
        ("alexnet_ungrouped", 224, 249.5, 1683, 6.95),
        ("alexnet_ungrouped", 227, 249.5, 1700, None),
        ("googlenet", 224, 53.5, 19195, 9.78),
        ("vgg19", 224, 574.7, 42679, 120.6),
    ],
)
def test_volumes_of_a_batch_of_1024(
    name: str, side: int, weights: float, data: float, tera: float | None
) -> None:
    with torch.device("meta"):
        volumes = profile(build_model(name), (3, side, side), 1024)
    assert volumes.weight_bytes / 1e6 == pytest.approx(weights, rel=1e-3)
    assert volumes.data_bytes / 1e6 == pytest.approx(data, rel=1e-3)
    if tera is not None:
        assert volumes.forward_backward_flops / 1e12 == pytest.approx(tera, rel=1e-3)
