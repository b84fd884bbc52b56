"""Parameter names and shapes are torchvision's, so that public weights load."""

import json
from pathlib import Path

import pytest
import torch

from firecaffe.models import build_model

KINDS = ("weight", "bias")

TORCHVISION: dict[str, str] = json.loads(
    Path(__file__).with_name("torchvision_keys.json").read_text()
)
"""NAME=SHAPE of each tensor of a state_dict, in order, by network."""

OURS = {"alexnet": "alexnet_owt", "googlenet": "googlenet_bn"}
"""Our names of networks that have others there."""


@pytest.mark.parametrize("name", [name for name in TORCHVISION if name != "source"])
def test_names_shapes_and_their_order_are_torchvisions(name: str) -> None:
    with torch.device("meta"):
        state = build_model(OURS.get(name, name)).state_dict()
    found = [f"{key}={'x'.join(map(str, each.shape))}" for key, each in state.items()]
    assert found == TORCHVISION[name].split()


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


def test_names_of_lenet_300_100_are_those_of_lenet() -> None:
    assert list(build_model("lenet_300_100").state_dict()) == [
        f"{layer}.{kind}" for layer in ("ip1", "ip2", "ip3") for kind in KINDS
    ]


@pytest.mark.parametrize(("name", "blocks"), [("nin_small", 3), ("nin_cifar", 3), ("nin", 4)])
def test_names_of_nin_are_the_authors(name: str, blocks: int) -> None:
    with torch.device("meta"):
        state = build_model(name).state_dict()
    layers = [(f"conv{n}", f"cccp{2 * n - 1}", f"cccp{2 * n}") for n in range(1, blocks + 1)]
    assert list(state) == [f"{layer}.{kind}" for trio in layers for layer in trio for kind in KINDS]
