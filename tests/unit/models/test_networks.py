"""Every network: shapes, gradients, heads, loss; names and counts as their authors' are."""

import json
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firecaffe.errors import RecipeError
from firecaffe.models import (
    AUX_WEIGHT,
    MODELS,
    HeadedLogits,
    build_model,
    classification_loss,
)
from firecaffe.models.googlenet import googlenet, googlenet_bn
from firecaffe.models.layer_costs import profile

HEADED = ["googlenet", "googlenet_bn"]
HEADS = ("fc", "aux2", "aux1")

# From the authors' files; torchvision's for googlenet_bn.
DROPOUTS = (
    ("nin_small nin squeezenet1_0 squeezenet1_1", [0.5]),
    ("nin_cifar alexnet alexnet_ungrouped alexnet_owt caffenet vgg16 vgg19", [0.5, 0.5]),
    ("googlenet", [0.4, 0.7, 0.7]),
    ("googlenet_bn", [0.2, 0.7, 0.7]),
    ("googlenet_small_bn", [0.4]),
)
DROPOUT = {name: shares for names, shares in DROPOUTS for name in names.split()}

# Source of the list: the documentation of torch.use_deterministic_algorithms.
NONDETERMINISTIC_ON_CUDA = (
    *(nn.AvgPool3d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool2d, nn.FractionalMaxPool2d),
    nn.LocalResponseNorm,  # torch's own takes AvgPool3d
)


@cache
def outline(name: str, **words: int) -> nn.Module:
    with torch.device("meta"):
        return build_model(name, **words)


@pytest.mark.parametrize("name", MODELS)
def test_any_number_of_classes_and_channels_and_every_weight_has_a_gradient(name: str) -> None:
    network = outline(name, num_classes=7, in_channels=2)
    outputs = network(torch.empty(2, 2, *MODELS[name].input_CHW[1:], device="meta"))
    heads = outputs if name in HEADED else [outputs]
    assert [logits.shape for logits in heads] == [(2, 7)] * (3 if name in HEADED else 1)
    labels_B = torch.zeros(2, dtype=torch.long, device="meta")
    torch.autograd.backward(classification_loss(outputs, labels_B))
    for parameter_name, parameter in network.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.shape == parameter.shape


@pytest.mark.parametrize("name", MODELS)
def test_dropout_is_the_one_that_the_trainer_knows_and_no_layer_is_nondeterministic(
    name: str,
) -> None:
    layers = list(outline(name).modules())
    dropout = [part for part in layers if "Dropout" in type(part).__name__]
    assert sorted(p.p for p in dropout if type(p) is nn.Dropout) == DROPOUT.get(name, [])
    assert len(dropout) == len(DROPOUT.get(name, []))
    for part in layers:
        assert not isinstance(part, NONDETERMINISTIC_ON_CUDA)
        # To a size of one it is a mean.
        assert not isinstance(part, nn.AdaptiveAvgPool2d) or part.output_size in (1, (1, 1))


@pytest.mark.parametrize(
    ("name", "side"),
    [("lenet", 28), ("lenet_300_100", 28), ("vgg_small_bn", 32), ("nin_cifar", 32)]
    + [(name, side) for name in ("nin_small", "googlenet_small_bn") for side in (28, 32)],
)
def test_small_networks_on_real_numbers(name: str, side: int) -> None:
    torch.manual_seed(0)
    network = build_model(name)
    channels = MODELS[name].input_CHW[0]
    outputs = network(torch.randn(2, channels, side, side))
    loss = classification_loss(outputs, torch.tensor([3, 7]))
    torch.autograd.backward(loss)
    assert loss.isfinite()
    for parameter_name, parameter in network.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.isfinite().all(), parameter_name


@pytest.mark.parametrize("name", HEADED)
def test_heads_answer_in_training_only_and_in_torchvisions_order(name: str) -> None:
    with torch.device("meta"):
        network, images_BCHW = build_model(name), torch.empty(1, 3, 224, 224)
    outputs_of: dict[str, Tensor] = {}
    channels_of: dict[str, int] = {}

    def hear(head: str, inputs: tuple[Tensor], output: Tensor) -> None:
        outputs_of[head], channels_of[head] = output, inputs[0].shape[1]

    for head in HEADS:
        part = network.get_submodule(head)
        part.register_forward_hook(lambda _, inputs, output, head=head: hear(head, inputs, output))
    outputs = network(images_BCHW)
    assert isinstance(outputs, HeadedLogits)
    assert outputs._fields == ("logits", "aux2", "aux1")
    assert all(ours is outputs_of[head] for ours, head in zip(outputs, HEADS, strict=True))
    assert (channels_of["aux1"], channels_of["aux2"]) == (512, 528)  # as in the paper
    assert isinstance(network.eval()(images_BCHW), Tensor)


def test_loss_weighs_each_head_by_three_tenths() -> None:
    logits, aux2, aux1 = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0)).unbind()
    labels_B = torch.tensor([0, 1, 2, 3, 0])
    main, second, first = (F.cross_entropy(t, labels_B).item() for t in (logits, aux2, aux1))
    loss = classification_loss(HeadedLogits(logits, aux2, aux1), labels_B).item()
    assert AUX_WEIGHT == 0.3
    assert loss == pytest.approx(main + 0.3 * (second + first))
    assert classification_loss(logits, labels_B).item() == pytest.approx(main)


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("alexnet", "Conv2d ReLU LocalResponseNorm MaxPool2d Conv2d"),
        ("caffenet", "Conv2d ReLU MaxPool2d LocalResponseNorm Conv2d"),
        (
            "googlenet",
            "Conv2d ReLU MaxPool2d LocalResponseNorm Conv2d ReLU Conv2d ReLU LocalResponseNorm",
        ),
    ],
)
def test_normalization_stands_where_the_authors_have_it(name: str, layers: str) -> None:
    rows = profile(outline(name), MODELS[name].input_CHW, 1).layers
    assert " ".join(row.kind for row in rows).startswith(layers)


TORCHVISION: dict[str, str] = json.loads(
    Path(__file__).with_name("torchvision_keys.json").read_text()
)
"""NAME=SHAPE of each tensor of a state_dict, in order, by network."""

OURS = {"alexnet": "alexnet_owt", "googlenet": "googlenet_bn"}
"""Our names of networks that have others there."""


@pytest.mark.parametrize("name", [name for name in TORCHVISION if name != "source"])
def test_names_shapes_and_their_order_are_torchvisions(name: str) -> None:
    state = outline(OURS.get(name, name)).state_dict()
    ours = [f"{key}={'x'.join(map(str, each.shape))}" for key, each in state.items()]
    assert ours == TORCHVISION[name].split()


def test_names_of_googlenet_follow_the_same_style() -> None:
    state = outline("googlenet").state_dict()
    assert state["conv1.conv.bias"].shape == (64,)
    assert state["inception3a.branch3.1.conv.weight"].shape == (32, 16, 5, 5)
    assert state["aux1.fc1.weight"].shape == (1024, 2048)


NIN = [f"conv{n} cccp{2 * n - 1} cccp{2 * n}" for n in range(1, 5)]
AUTHORS = {"lenet": "conv1 conv2 ip1 ip2", "lenet_300_100": "ip1 ip2 ip3", "nin": " ".join(NIN)}
AUTHORS |= dict.fromkeys(("nin_small", "nin_cifar"), " ".join(NIN[:3]))


@pytest.mark.parametrize("name", AUTHORS)
def test_names_are_the_authors(name: str) -> None:
    layers = AUTHORS[name].split()
    expected = [f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")]
    assert list(outline(name).state_dict()) == expected


def test_unknown_name_is_answered_with_the_closest_and_all() -> None:
    with pytest.raises(RecipeError) as caught:
        build_model("resnet-50")
    message = str(caught.value)
    assert message.startswith("model.name: ")
    assert "did you mean resnet50?" in message
    assert all(name in message for name in MODELS)
    assert "\n" not in message
    with pytest.raises(RecipeError) as caught:
        build_model("transformer-xxl")
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize("words", [{"num_classes": 0}, {"in_channels": -1}])
def test_numbers_below_one_are_refused(words: dict[str, int]) -> None:
    with pytest.raises(RecipeError, match=rf"^model\.{next(iter(words))}: "):
        build_model("lenet", **words)


# Parameters, millions of MACs of an image, MB of weights, MB of FireCaffe's D at a batch of 1024;
# of `googlenet` and `googlenet_bn` with both heads.
COUNTS = {
    "lenet": (431_080, 2.293, 1.7, 20),
    "lenet_300_100": (266_610, 0.2662, 1.1, 5),
    "cifar10_quick": (145_578, 12.354, 0.6, 59),
    "cifar10_full": (89_578, 12.298, 0.4, 59),
    "nin_small": (101_682, 11.36, 0.4, 350),
    "nin_cifar": (966_986, 222.5, 3.9, 2_143),
    "nin": (7_595_176, 1100.2, 30.4, 5_793),
    "alexnet": (60_965_224, 724.4, 243.9, 1_700),
    "alexnet_ungrouped": (62_378_344, 1131.5, 249.5, 1_683),
    "alexnet_owt": (61_100_840, 714.2, 244.4, 1_455),
    "caffenet": (60_965_224, 724.4, 243.9, 1_700),
    "googlenet": (13_378_280, 1591.0, 53.5, 19_195),
    "googlenet_bn": (13_004_888, 1506.7, 52.0, 19_195),
    "googlenet_small_bn": (67_138, 10.16, 0.3, 636),
    "vgg16": (138_357_544, 15470.3, 553.4, 37_336),
    "vgg19": (143_667_240, 19632.1, 574.7, 42_679),
    "vgg_small_bn": (1_170_714, 12.24, 4.7, 74),
    "squeezenet1_0": (1_248_424, 818.9, 5.0, 12_116),
    "squeezenet1_1": (1_235_496, 349.2, 4.9, 7_045),
    "resnet18": (11_689_512, 1814.1, 46.8, 8_942),
    "resnet50": (25_557_032, 4089.2, 102.2, 43_682),
    "resnet152": (60_192_808, 11513.6, 240.8, 90_540),
}


@pytest.mark.parametrize("name", MODELS)
def test_counts_are_those_that_were_published_and_of_the_rows(name: str) -> None:
    volumes = profile(outline(name), MODELS[name].input_CHW, 1024)
    parameters, million_macs, weight_mb, data_mb = COUNTS[name]
    assert volumes.parameters == parameters
    assert volumes.macs / 1024e6 == pytest.approx(million_macs, rel=1e-3)
    assert round(volumes.weight_bytes / 1e6, 1) == weight_mb
    assert round(volumes.data_bytes / 1e6) == data_mb
    assert volumes.forward_backward_flops == 6 * volumes.macs
    for total in ("parameters", "weight_bytes", "macs", "forward_backward_flops"):
        assert sum(getattr(row, total) for row in volumes.layers) == getattr(volumes, total), total


def test_googlenets_without_heads_have_torchvisions_counts() -> None:
    with torch.device("meta"):
        plain, normalized = googlenet(aux_logits=False), googlenet_bn(aux_logits=False)
    volumes = profile(normalized, (3, 224, 224), 1)
    assert profile(plain, (3, 224, 224), 1).parameters == 6_998_552
    assert volumes.parameters == 6_624_904
    assert volumes.macs / 1e9 == pytest.approx(1.498, abs=5e-4)
