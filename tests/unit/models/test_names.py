"""Parameter names and shapes are torchvision's, so that public weights load."""

import pytest
import torch

from firecaffe.models import build_model

KINDS = ("weight", "bias")

# From the state dicts of torchvision's models of the same name; googlenet_bn is its googlenet.
TORCHVISION: dict[str, dict[str, tuple[int, ...]]] = {
    "squeezenet1_0": {
        "features.0.weight": (96, 3, 7, 7),
        "features.3.squeeze.weight": (16, 96, 1, 1),
        "features.7.expand1x1.bias": (128,),
        "features.12.expand3x3.weight": (256, 64, 3, 3),
        "classifier.1.weight": (1000, 512, 1, 1),
    },
    "squeezenet1_1": {
        "features.0.weight": (64, 3, 3, 3),
        "features.3.squeeze.bias": (16,),
        "features.6.expand1x1.weight": (128, 32, 1, 1),
        "features.12.squeeze.weight": (64, 512, 1, 1),
        "classifier.1.bias": (1000,),
    },
    "vgg16": {
        "features.0.weight": (64, 3, 3, 3),
        "features.28.weight": (512, 512, 3, 3),
        "classifier.0.weight": (4096, 25088),
        "classifier.3.bias": (4096,),
        "classifier.6.weight": (1000, 4096),
    },
    "vgg19": {
        "features.16.weight": (256, 256, 3, 3),
        "features.34.bias": (512,),
        "classifier.6.bias": (1000,),
    },
    "resnet18": {
        "conv1.weight": (64, 3, 7, 7),
        "bn1.running_mean": (64,),
        "layer2.0.downsample.0.weight": (128, 64, 1, 1),
        "layer2.0.downsample.1.num_batches_tracked": (),
        "layer4.1.bn2.running_var": (512,),
        "fc.weight": (1000, 512),
    },
    "resnet50": {
        "layer1.0.downsample.0.weight": (256, 64, 1, 1),
        "layer1.0.conv1.weight": (64, 64, 1, 1),
        "layer3.5.conv3.weight": (1024, 256, 1, 1),
        "layer4.2.bn3.bias": (2048,),
        "fc.bias": (1000,),
    },
    "resnet152": {
        "layer2.7.conv2.weight": (128, 128, 3, 3),
        "layer3.35.conv1.weight": (256, 1024, 1, 1),
    },
    "googlenet_bn": {
        "conv1.conv.weight": (64, 3, 7, 7),
        "conv1.bn.running_mean": (64,),
        "conv3.conv.weight": (192, 64, 3, 3),
        "inception3a.branch1.bn.weight": (64,),
        "inception3a.branch2.1.conv.weight": (128, 96, 3, 3),
        "inception3a.branch3.1.conv.weight": (32, 16, 3, 3),
        "inception4e.branch2.0.conv.weight": (160, 528, 1, 1),
        "inception5b.branch4.1.conv.weight": (128, 832, 1, 1),
        "aux1.conv.conv.weight": (128, 512, 1, 1),
        "aux1.conv.bn.bias": (128,),
        "aux2.fc1.weight": (1024, 2048),
        "aux2.fc2.weight": (1000, 1024),
        "fc.weight": (1000, 1024),
    },
}

# Two entries per layer with bias; one per convolution and five per batch normalization.
ENTRIES = {
    "squeezenet1_0": 2 * 26,
    "squeezenet1_1": 2 * 26,
    "vgg16": 2 * 16,
    "vgg19": 2 * 19,
    "resnet18": 6 * 20 + 2,
    "resnet50": 6 * 53 + 2,
    "resnet152": 6 * 155 + 2,
    "googlenet_bn": 6 * (3 + 9 * 6 + 2) + 2 * 5,
}


@pytest.mark.parametrize("name", TORCHVISION)
def test_names_and_shapes_are_torchvisions(name: str) -> None:
    with torch.device("meta"):
        state = build_model(name).state_dict()
    shapes = {key: tuple(state[key].shape) for key in TORCHVISION[name] if key in state}
    assert shapes == TORCHVISION[name]
    assert len(state) == ENTRIES[name]


def test_names_of_googlenet_follow_the_same_style() -> None:
    with torch.device("meta"):
        state = build_model("googlenet").state_dict()
    assert state["conv1.conv.bias"].shape == (64,)
    assert state["inception3a.branch3.1.conv.weight"].shape == (32, 16, 5, 5)
    assert state["aux1.fc1.weight"].shape == (1024, 2048)


def test_names_of_lenet_are_caffes() -> None:
    assert list(build_model("lenet").state_dict()) == [
        f"{layer}.{kind}" for layer in ("conv1", "conv2", "ip1", "ip2") for kind in KINDS
    ]


@pytest.mark.parametrize(("name", "blocks"), [("nin_small", 3), ("nin_cifar", 3), ("nin", 4)])
def test_names_of_nin_are_the_authors(name: str, blocks: int) -> None:
    with torch.device("meta"):
        state = build_model(name).state_dict()
    layers = [(f"conv{n}", f"cccp{2 * n - 1}", f"cccp{2 * n}") for n in range(1, blocks + 1)]
    assert list(state) == [f"{layer}.{kind}" for trio in layers for layer in trio for kind in KINDS]
