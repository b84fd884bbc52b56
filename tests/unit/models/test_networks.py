"""Every network: shapes, gradients, heads, loss; names and counts as their authors' are."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from firecaffe.errors import RecipeError
from firecaffe.models import (
    AUX_WEIGHT,
    MODELS,
    HeadedLogits,
    build_model,
    classification_loss,
    logits_of,
)
from firecaffe.models.layer_costs import profile
from firecaffe.models.nin import nin_small

HEADED = ["googlenet", "googlenet_bn"]
SMALL = ("nin_small", "nin_cifar", "googlenet_small_bn")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("name", MODELS)
def test_forward_and_backward_have_the_right_shapes(name: str) -> None:
    with torch.device("meta"):
        network = build_model(name)
        images_BCHW = torch.empty(2, *MODELS[name].input_CHW)
        labels_B = torch.zeros(2, dtype=torch.long)
    outputs = network(images_BCHW)
    assert logits_of(outputs).shape == (2, MODELS[name].num_classes)
    torch.autograd.backward(classification_loss(outputs, labels_B))
    for parameter_name, parameter in network.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.shape == parameter.shape


@pytest.mark.parametrize("name", MODELS)
def test_number_of_classes_and_channels_can_be_chosen(name: str) -> None:
    with torch.device("meta"):
        network = build_model(name, num_classes=7, in_channels=2)
        outputs = network(torch.empty(2, 2, *MODELS[name].input_CHW[1:]))
    assert all(logits.shape == (2, 7) for logits in (outputs if name in HEADED else [outputs]))


@pytest.mark.parametrize("in_channels", [1, 3])
@pytest.mark.parametrize(
    ("name", "side"),
    [("lenet", 28), ("lenet_300_100", 28), ("vgg_small_bn", 32)]
    + [(name, side) for name in SMALL for side in (28, 32)],
)
def test_small_networks_on_real_numbers(name: str, side: int, in_channels: int) -> None:
    network = build_model(name, in_channels=in_channels)
    loss = classification_loss(
        network(torch.randn(2, in_channels, side, side)), torch.tensor([3, 7])
    )
    torch.autograd.backward(loss)
    assert loss.isfinite()
    for parameter_name, parameter in network.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.isfinite().all(), parameter_name


@pytest.mark.parametrize("name", HEADED)
def test_heads_answer_in_training_only(name: str) -> None:
    with torch.device("meta"):
        network = build_model(name)
        images_BCHW = torch.empty(2, 3, 224, 224)
    outputs = network(images_BCHW)
    assert isinstance(outputs, HeadedLogits)
    assert outputs._fields == ("logits", "aux2", "aux1")
    network.eval()
    assert isinstance(network(images_BCHW), torch.Tensor)


def test_heads_sit_where_the_paper_has_them() -> None:
    network = build_model("googlenet", num_classes=3)
    heard: dict[str, int] = {}
    for name in ("aux1", "aux2"):
        head = network.get_submodule(name)
        head.register_forward_hook(
            lambda _, inputs, __, name=name: heard.update({name: inputs[0].shape[1]})
        )
    network(torch.randn(1, 3, 224, 224))
    assert heard == {"aux1": 512, "aux2": 528}


def test_outputs_of_the_heads_come_in_torchvisions_order() -> None:
    network = build_model("googlenet", num_classes=3)
    for number, name in enumerate(("fc", "aux2.fc2", "aux1.fc2")):
        classifier = network.get_submodule(name)
        assert isinstance(classifier, nn.Linear)
        nn.init.zeros_(classifier.weight)
        nn.init.constant_(classifier.bias, number)
    outputs = network(torch.randn(1, 3, 224, 224))
    assert [logits.unique().item() for logits in outputs] == [0.0, 1.0, 2.0]


def test_loss_weighs_each_head_by_three_tenths() -> None:
    logits, aux2, aux1 = torch.randn(3, 5, 4).unbind()
    labels_B = torch.tensor([0, 1, 2, 3, 0])
    main, second, first = (F.cross_entropy(t, labels_B).item() for t in (logits, aux2, aux1))
    loss = classification_loss(HeadedLogits(logits, aux2, aux1), labels_B).item()
    assert AUX_WEIGHT == 0.3
    assert loss == pytest.approx(main + 0.3 * (second + first))
    assert classification_loss(logits, labels_B).item() == pytest.approx(main)
    assert logits_of(HeadedLogits(logits, aux2, aux1)) is logits_of(logits)


# From the authors' files; torchvision's for googlenet_bn.
DROPOUT = {
    "nin_small": [0.5],
    "nin_cifar": [0.5, 0.5],
    "nin": [0.5],
    "alexnet": [0.5, 0.5],
    "alexnet_ungrouped": [0.5, 0.5],
    "alexnet_owt": [0.5, 0.5],
    "caffenet": [0.5, 0.5],
    "googlenet": [0.4, 0.7, 0.7],
    "googlenet_bn": [0.2, 0.7, 0.7],
    "googlenet_small_bn": [0.4],
    "vgg16": [0.5, 0.5],
    "vgg19": [0.5, 0.5],
    "squeezenet1_0": [0.5],
    "squeezenet1_1": [0.5],
}


@pytest.mark.parametrize("name", MODELS)
def test_dropout_is_the_layer_that_the_trainer_knows(name: str) -> None:
    with torch.device("meta"):
        network = build_model(name)
    layers = [part for part in network.modules() if "Dropout" in type(part).__name__]
    assert sorted(p.p for p in layers if type(p) is nn.Dropout) == DROPOUT.get(name, [])
    assert len(layers) == len(DROPOUT.get(name, []))


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("alexnet", "Conv2d ReLU LocalResponseNorm MaxPool2d Conv2d"),
        ("caffenet", "Conv2d ReLU MaxPool2d LocalResponseNorm Conv2d"),
        (
            "googlenet",
            "Conv2d ReLU MaxPool2d LocalResponseNorm "
            "Conv2d ReLU Conv2d ReLU LocalResponseNorm MaxPool2d",
        ),
    ],
)
def test_normalization_stands_where_the_authors_have_it(name: str, layers: str) -> None:
    with torch.device("meta"):
        rows = profile(build_model(name), MODELS[name].input_CHW, 1).layers
    kinds = [row.kind for row in rows]
    assert kinds[: len(layers.split())] == layers.split()


# Source of the list: the documentation of torch.use_deterministic_algorithms.
NONDETERMINISTIC_ON_CUDA = (
    nn.AvgPool3d,
    nn.AdaptiveAvgPool3d,
    nn.AdaptiveMaxPool2d,
    nn.FractionalMaxPool2d,
    # torch's own takes AvgPool3d.
    nn.LocalResponseNorm,
)


@pytest.mark.parametrize("name", MODELS)
def test_no_layer_without_a_deterministic_backward(name: str) -> None:
    with torch.device("meta"):
        network = build_model(name)
    for part in network.modules():
        assert not isinstance(part, NONDETERMINISTIC_ON_CUDA)
        # To a size of one it is a mean.
        if isinstance(part, nn.AdaptiveAvgPool2d):
            assert part.output_size in (1, (1, 1))


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


def nin(blocks: int) -> str:
    return " ".join(f"conv{n} cccp{2 * n - 1} cccp{2 * n}" for n in range(1, blocks + 1))


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("lenet", "conv1 conv2 ip1 ip2"),
        ("lenet_300_100", "ip1 ip2 ip3"),
        ("nin_small", nin(3)),
        ("nin_cifar", nin(3)),
        ("nin", nin(4)),
    ],
)
def test_names_are_the_authors(name: str, layers: str) -> None:
    with torch.device("meta"):
        state = build_model(name).state_dict()
    assert list(state) == [
        f"{each}.{kind}" for each in layers.split() for kind in ("weight", "bias")
    ]


def test_unknown_name_is_answered_with_the_closest_and_all() -> None:
    with pytest.raises(RecipeError) as caught:
        build_model("resnet-50")
    message = str(caught.value)
    assert message.startswith("model.name: no network is called 'resnet-50'")
    assert "did you mean resnet50?" in message
    assert all(name in message for name in MODELS)
    assert "\n" not in message
    with pytest.raises(RecipeError, match="there are lenet, ") as caught:
        build_model("transformer-xxl")
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "arguments"),
    [("num_classes", {"num_classes": 0}), ("in_channels", {"in_channels": -1})],
)
def test_numbers_below_one_are_refused(field: str, arguments: dict[str, int]) -> None:
    with pytest.raises(RecipeError, match=rf"^model\.{field}: found .*, must be at least 1"):
        build_model("lenet", **arguments)


# Parameters, millions of MACs of an image, MB of weights, MB of FireCaffe's D at a batch of 1024;
# of `googlenet` and `googlenet_bn` with both heads.
COUNTS = {
    "lenet": (431_080, 2.3, 1.7, 20),
    "lenet_300_100": (266_610, 0.3, 1.1, 5),
    "cifar10_quick": (145_578, 12.4, 0.6, 59),
    "cifar10_full": (89_578, 12.3, 0.4, 59),
    "nin_small": (101_682, 11.4, 0.4, 350),
    "nin_cifar": (966_986, 222.5, 3.9, 2_143),
    "nin": (7_595_176, 1100.2, 30.4, 5_793),
    "alexnet": (60_965_224, 724.4, 243.9, 1_700),
    "alexnet_ungrouped": (62_378_344, 1131.5, 249.5, 1_683),
    "alexnet_owt": (61_100_840, 714.2, 244.4, 1_455),
    "caffenet": (60_965_224, 724.4, 243.9, 1_700),
    "googlenet": (13_378_280, 1591.0, 53.5, 19_195),
    "googlenet_bn": (13_004_888, 1506.7, 52.0, 19_195),
    "googlenet_small_bn": (67_138, 10.2, 0.3, 636),
    "vgg16": (138_357_544, 15470.3, 553.4, 37_336),
    "vgg19": (143_667_240, 19632.1, 574.7, 42_679),
    "vgg_small_bn": (1_170_714, 12.2, 4.7, 74),
    "squeezenet1_0": (1_248_424, 818.9, 5.0, 12_116),
    "squeezenet1_1": (1_235_496, 349.2, 4.9, 7_045),
    "resnet18": (11_689_512, 1814.1, 46.8, 8_942),
    "resnet50": (25_557_032, 4089.2, 102.2, 43_682),
    "resnet152": (60_192_808, 11513.6, 240.8, 90_540),
}


@pytest.mark.parametrize("name", MODELS)
def test_counts_are_those_that_were_published(name: str) -> None:
    with torch.device("meta"):
        volumes = profile(build_model(name), MODELS[name].input_CHW, 1)
    parameters, million_macs, weight_mb, data_mb = COUNTS[name]
    assert volumes.parameters == parameters
    assert round(volumes.macs / 1e6, 1) == million_macs
    assert round(volumes.weight_bytes / 1e6, 1) == weight_mb
    assert round(1024 * volumes.data_bytes / 1e6) == data_mb


def test_nin_small_learns() -> None:
    network = nin_small(num_classes=2)
    images_BCHW = torch.zeros(16, 1, 28, 28)
    images_BCHW[8:, :, :14] = 1.0
    labels_B = torch.arange(16) // 8
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(25):
        optimizer.zero_grad()
        loss = classification_loss(network(images_BCHW), labels_B)
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 < losses[0]
