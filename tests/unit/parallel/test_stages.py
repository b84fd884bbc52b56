"""Networks in stages, one after the other, end in the bits of the whole network."""

import copy
import gc
import re
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from firecaffe.errors import RecipeError
from firecaffe.models.known_networks import MODELS, build_model
from firecaffe.models.model import classification_loss
from firecaffe.parallel.passed import pack, tensors_in
from firecaffe.parallel.stages import cut_stages
from tests.unit.parallel.in_stages import check_same_bits, narrow, run_in_stages, sent
from tests.unit.parallel.odd import odd, odd_loss

NETWORKS = [
    ("lenet", 28, [["conv2", "ip1"], ["relu1"]]),
    ("alexnet", 227, [["features.1", "features.8", "classifier.1"], ["classifier"]]),
    ("vgg16", 224, [["features.5", "features.17", "classifier.3"]]),
    ("googlenet", 224, [["norm2", "inception4b", "inception5a"], ["inception3b.branch3.1.conv"]]),
    ("googlenet_bn", 224, [["inception4b", "inception4e.branch2", "fc"]]),
    ("squeezenet1_1", 64, [["features.6.expand3x3", "classifier"], ["features.4.expand3x3"]]),
    ("resnet18", 64, [["layer1.1.bn2", "layer2", "layer3.0.downsample"]]),
]


@pytest.mark.parametrize(
    ("name", "size", "names"),
    [(name, size, names) for name, size, cuts in NETWORKS for names in cuts],
)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_our_networks(name: str, size: int, names: list[str], training: bool) -> None:
    torch.manual_seed(0)
    network = narrow(name).train(training)
    x = torch.randn(3, 1 if name == "lenet" else 3, size, size)
    check_same_bits(network, names, x, lambda y: classification_loss(y, torch.tensor([0, 2, 4])))


def test_each_tensor_is_the_networks_own_by_its_name() -> None:
    network = narrow("googlenet_bn")
    stages = cut_stages(network, ["inception4b", "fc"])
    found: dict[str, Tensor] = {}
    for stage in stages:
        own = dict(stage.module.named_parameters()) | dict(stage.module.named_buffers())
        assert not own.keys() & found.keys()
        found |= own
    expected = dict(network.named_parameters()) | dict(network.named_buffers())
    assert found.keys() == expected.keys()
    assert all(found[name] is each for name, each in expected.items())


@pytest.mark.parametrize(
    "names",
    [
        [],
        ["head"],
        ["act"],
        ["act", "middle", "last"],
        ["middle.1", "last.1"],
        ["first.1", "head.2", "middle.2", "last.2"],
    ],
    ids=str,
)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_an_odd_network(names: list[str], training: bool) -> None:
    network, x = odd()
    if not training:
        names = [name for name in names if not name.startswith("head")]
    check_same_bits(network.train(training), names, x, odd_loss)


def test_a_rank_can_keep_its_stage_alone() -> None:
    network, _ = odd()
    others = weakref.ref(network.get_submodule("last.2"))
    stage = cut_stages(network, ["last"])[0]
    del network
    gc.collect()
    assert others() is None
    assert stage.module.get_parameter("first.0.weight").shape == (6, 3, 3, 3)


def test_the_network_stays_as_it_is() -> None:
    network, _ = odd()
    state, own = copy.deepcopy(network.state_dict()), set(vars(network))
    stages = cut_stages(network, ["middle"])
    names = [name for stage in stages for name in stage.module.state_dict()]
    assert sorted(names) == sorted(state)
    assert set(vars(network)) == own
    assert all(torch.equal(each, state[name]) for name, each in network.state_dict().items())


def test_inputs_that_need_no_gradient_and_stages_without_any() -> None:
    """A frozen first stage, and a last one without parameters."""
    network, x = odd()
    network.get_submodule("first").requires_grad_(False)
    check_same_bits(network, ["head", "last.2"], x, odd_loss)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Softmax(1)).requires_grad_(False)
    plain[0].requires_grad_(True)
    check_same_bits(plain, ["1", "2"], torch.randn(2, 4), lambda y: y.square().sum())


class Recurrent(nn.Module):
    """A stack of recurrent layers; the upper ones begin in the state that the lower end in."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.GRU(5, 8, num_layers=2, dropout=0.5, batch_first=True)
        self.middle = nn.GRU(8, 8, num_layers=2, batch_first=True)
        self.top = nn.LSTM(8, 6, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y, state = self.bottom(x)
        y, _ = self.middle(y, state)
        y, (last, _) = self.top(y)
        logits: Tensor = self.head(last[-1] + y.mean(1))
        return logits


@pytest.mark.parametrize("names", [["middle"], ["middle", "top", "head"]], ids=str)
def test_recurrent_layers(names: list[str]) -> None:
    torch.manual_seed(0)
    x, labels = torch.randn(3, 7, 5), torch.tensor([0, 2, 1])
    check_same_bits(Recurrent(), names, x, lambda y: classification_loss(y, labels))


class Alike(nn.Module):
    """Two branches that call one activation, around what stands at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.act = nn.ReLU()
        self.unused = nn.Linear(4, 4)
        self.d = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.a(x)) + self.shift
        y = self.act(self.b(y))
        result: Tensor = self.d(self.c(y))
        return result


def shared_weight(model: Any) -> None:
    model.c.weight = model.a.weight


def buffer_of_two(model: Any) -> None:
    model.c.register_buffer("own", model.shift)


def hooked(model: Any) -> None:
    model.register_forward_hook(lambda *_: None)


def depends_on_data(model: Any) -> None:
    model.d.forward = lambda x: model.d[1](model.d[0](x)) if x.sum() > 0 else x


def draws(model: Any) -> None:
    model.d.forward = lambda x: model.d[1](model.d[0](x)) * float(torch.rand(1))


def hooked_inside(model: Any) -> None:
    model.d.register_full_backward_hook(lambda *_: None)


def nothing(model: Any) -> None:
    pass


@pytest.mark.parametrize(
    ("names", "change", "told"),
    [
        (["dd"], nothing, "'dd' is no module of the network, as d$"),
        (["elsewhere"], nothing, "'elsewhere' is no module of the network, as a, b, c, act, …"),
        (["c", "b"], nothing, "b is called before c; name modules in the order"),
        (["b", "b"], nothing, "b is named twice"),
        (["act"], nothing, "act is called more than once"),
        (["b", "unused"], nothing, "unused is not called in training"),
        (["a"], nothing, "the first stage would be empty; leave out a"),
        (["b", "d", "d.0"], nothing, "the stage of d would be empty; leave out d"),
        (["b"], shared_weight, "a.weight and c.weight are one tensor, used in two stages"),
        (["b"], buffer_of_two, "(shift and c.own|c.own and shift) are one tensor"),
        (["b"], hooked, "the network has hooks"),
        (["d.1"], hooked_inside, "d has hooks"),
        (["d.1"], depends_on_data, "what d calls cannot be followed .*let no stage begin inside"),
        (["d.1"], draws, "random numbers are drawn beside the network's modules"),
    ],
)
def test_cuts_that_cannot_be(
    names: list[str], change: Callable[[nn.Module], None], told: str
) -> None:
    network = Alike()
    change(network)
    before = torch.get_rng_state()
    with pytest.raises(RecipeError, match=f"^stages: {told}"):
        cut_stages(network, names)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_depends_on_data_may_stand_inside_a_stage() -> None:
    network = Alike()
    depends_on_data(network)
    check_same_bits(network, ["c", "d"], torch.randn(3, 4), lambda y: y.square().sum())


@dataclass
class Outputs(OrderedDict[str, Any]):
    """Like those of Hugging Face: a dict and its attributes."""

    logits: Tensor
    side: Tensor | None = None

    def __post_init__(self) -> None:
        self.update({"logits": self.logits} | ({} if self.side is None else {"side": self.side}))


class WithOptions(nn.Module):
    """Takes more than a trainer gives it, and returns what it has a name for."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor, mask: Tensor | None = None, *more: Any, **options: Any) -> Any:
        y = self.a(x if mask is None else x * mask)
        if more or options.get("twice"):
            y = y * 2
        return Outputs(self.b(y), side=y)


def test_options_have_their_defaults_and_outputs_their_kind() -> None:
    def loss_of(outputs: Any) -> Tensor:
        assert type(outputs) is Outputs
        total: Tensor = outputs.logits.square().sum() + outputs["side"].sum()
        return total

    check_same_bits(WithOptions(), ["b"], torch.randn(3, 4), loss_of)


def test_layers_in_another_mode_than_the_network_stay_so() -> None:
    """As a frozen batch normalization."""
    network = WithOptions()
    network.b.eval()
    check_same_bits(network, ["b"], torch.randn(3, 4), lambda y: y.logits.square().sum())
    assert not cut_stages(network, ["b"])[1].module.get_submodule("b").training


class Twice(nn.Module):
    """A parameter, or a buffer, that is used before and after a cut."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        if kind == "parameter":
            self.scale = nn.Parameter(torch.ones(4))
        else:
            self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(x) * self.scale) * self.scale
        return y


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_a_tensor_that_two_stages_use(kind: str) -> None:
    with pytest.raises(RecipeError, match=r"^stages: scale is used in two stages"):
        cut_stages(Twice(kind), ["b"])


class Shared(nn.Module):
    """Two values that share memory."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        left, right = y.chunk(2, 1)
        total: Tensor = self.b(left) + right
        return total


def test_values_that_share_memory() -> None:
    network = Shared()
    with pytest.raises(RecipeError, match=r"^stages: two tensors that share memory"):
        run_in_stages(cut_stages(network, ["b"]), torch.randn(2, 4), torch.sum)


VALUES: dict[str, Any] = {
    "many kinds": (torch.rand(2, 3).t(), [1, True, None, "a"], {"b": (0.1, float("inf"))}),
    "every other column": torch.rand(5, 7)[1:4, ::2],
    "expanded": torch.rand(3, 1).expand(3, 4),
    "channels last": torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "empty": (torch.zeros(0, 3), torch.tensor(2), torch.ones(3, dtype=torch.bool)),
    "bfloat16": torch.rand(4).bfloat16(),
    "size": torch.Size([2, 3]),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_arrive_as_they_were(name: str) -> None:
    value = VALUES[name]
    found, wanted = sent(value)
    assert not wanted
    assert str(found) == str(tuple(value) if isinstance(value, torch.Size) else value)
    if isinstance(value, Tensor):
        assert torch.equal(found, value)
        assert (found.stride(), found.dtype) == (value.stride(), value.dtype)
        assert found.data_ptr() % 64 == value.data_ptr() % 64


def test_one_tensor_at_two_places_stays_one() -> None:
    x = torch.randn(3, requires_grad=True)
    (a, b), wanted = sent((x, x))
    assert a is b
    assert len(wanted) == 1


@pytest.mark.parametrize("value", [{1: 2}, {3}, nn.Linear(1, 1), torch.eye(2).to_sparse()])
def test_values_that_cannot_be_sent(value: Any) -> None:
    with pytest.raises(RecipeError, match="goes from one stage to the next"):
        pack(value)


def numbers(text: str) -> list[int]:
    """The numbers of a row of a page that are longer than three digits."""
    return [int(each.replace(",", "")) for each in re.findall(r"[\d,]{4,}", text)]


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ("AlexNet | `features.8`", "alexnet"),
        ("AlexNet | `classifier`", "alexnet"),
        ("VGG-16 | `features.17`", "vgg16"),
        ("ResNet-50 | `layer3`", "resnet50"),
        ("GoogLeNet | `inception4a`", "googlenet"),
        ("GoogLeNet | `inception5a`", "googlenet"),
    ],
)
def test_the_numbers_of_the_page(row: str, name: str) -> None:
    page = (Path(__file__).parents[3] / "docs/pipeline.md").read_text("utf-8")
    (line,) = (line for line in page.splitlines() if line.startswith(f"| {row}"))
    with torch.device("meta"):
        network = build_model(name)
        first, second = cut_stages(network, [row.split("`")[1]])
        given = first.module(torch.randn(1, *MODELS[name].input_CHW))
    weights = [sum(p.numel() for p in each.module.parameters()) for each in (first, second)]
    assert numbers(line) == [sum(each.numel() for each in tensors_in(given)), *weights]
