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

from firecaffe import ParallelConfig
from firecaffe.errors import RecipeError
from firecaffe.models.googlenet import classification_loss
from firecaffe.models.known_networks import MODELS, build_model
from firecaffe.parallel.stage_values import pack, tensors_in
from firecaffe.parallel.stages import cut_stages
from firecaffe.training.parallel.staged import check_stages
from tests.kit.training_modules import Composed
from tests.unit.parallel.in_stages import (
    check_same_bits,
    narrow,
    odd,
    odd_loss,
    run_in_stages,
    sent,
)

NETWORKS = [
    ("lenet", 28, [["conv2", "ip1"], ["relu1"]]),
    ("alexnet", 227, [["features.1", "features.8", "classifier.1"], ["classifier"]]),
    ("vgg16", 224, [["features.5", "features.17", "classifier.3"]]),
    ("googlenet_bn", 224, [["inception3b.branch3.1.conv"], ["inception4e.branch2", "fc"]]),
    ("squeezenet1_1", 64, [["features.6.expand3x3", "classifier"], ["features.4.expand3x3"]]),
    ("resnet18", 64, [["layer1.1.bn2", "layer2", "layer3.0.downsample"]]),
]


@pytest.mark.parametrize(
    ("name", "size", "names"),
    [(name, size, names) for name, size, cuts in NETWORKS for names in cuts],
)
def test_our_networks(name: str, size: int, names: list[str]) -> None:
    torch.manual_seed(0)
    network = narrow(name).train(name != "googlenet_bn")
    x = torch.randn(3, 1 if name == "lenet" else 3, size, size)
    check_same_bits(network, names, x, lambda y: classification_loss(y, torch.tensor([0, 2, 4])))


@pytest.mark.parametrize(
    "names",
    [
        *([], ["head"], ["act"], ["act", "middle", "last"], ["middle.1", "last.1"]),
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


def test_a_rank_can_keep_its_stage_alone_and_the_network_stays_as_it_is() -> None:
    network, _ = odd()
    state, members = copy.deepcopy(network.state_dict()), set(vars(network))
    stages = cut_stages(network, ["middle"])
    tensors = [
        dict(each.module.named_parameters(), **dict(each.module.named_buffers())) for each in stages
    ]
    assert not tensors[0].keys() & tensors[1].keys()
    own = dict(network.named_parameters(), **dict(network.named_buffers()))
    both = tensors[0] | tensors[1]
    assert both.keys() == own.keys() == state.keys()
    assert all(both[name] is each for name, each in own.items())
    assert set(vars(network)) == members
    assert all(torch.equal(each, state[name]) for name, each in network.state_dict().items())
    others, first = weakref.ref(network.get_submodule("last.2")), stages[0]
    del network, stages, tensors, own, both
    gc.collect()
    assert others() is None
    assert first.module.get_parameter("first.0.weight").shape == (6, 3, 3, 3)


def test_inputs_that_need_no_gradient_and_stages_without_any() -> None:
    """A frozen first stage, and a last one without parameters."""
    network, x = odd()
    network.get_submodule("first").requires_grad_(False)
    check_same_bits(network, ["head", "last.2"], x, odd_loss)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Softmax(1)).requires_grad_(False)
    plain[0].requires_grad_(True)
    check_same_bits(plain, ["1", "2"], torch.randn(2, 4), lambda y: y.square().sum())


def recurrent(m: Any, x: Tensor) -> Any:
    """A stack of recurrent layers; the upper ones begin in the state that the lower end in."""
    y, state = m.bottom(x)
    y, _ = m.middle(y, state)
    y, (last, _) = m.top(y)
    return m.head(last[-1] + y.mean(1))


@pytest.mark.parametrize("names", [["middle"], ["middle", "top", "head"]], ids=str)
def test_recurrent_layers(names: list[str]) -> None:
    torch.manual_seed(0)
    grus = {
        "bottom": nn.GRU(5, 8, num_layers=2, dropout=0.5, batch_first=True),
        "middle": nn.GRU(8, 8, num_layers=2, batch_first=True),
    }
    network = Composed(recurrent, **grus, top=nn.LSTM(8, 6, batch_first=True), head=nn.Linear(6, 3))
    x, labels = torch.randn(3, 7, 5), torch.tensor([0, 2, 1])
    check_same_bits(network, names, x, lambda y: classification_loss(y, labels))


class Alike(nn.Module):
    """Two branches that call one activation, around what stands at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.act, self.unused = nn.ReLU(), nn.Linear(4, 4)
        self.d = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: Tensor) -> Any:
        y = self.act(self.a(x)) + self.shift
        return self.d(self.c(self.act(self.b(y))))


def depends_on_data(model: Any) -> None:
    model.d.forward = lambda x: model.d[1](model.d[0](x)) if x.sum() > 0 else x


def draws(model: Any) -> None:
    model.d.forward = lambda x: model.d[1](model.d[0](x)) * float(torch.rand(1))


def one_weight(model: Any) -> None:
    model.c.weight = model.a.weight


def one_buffer(model: Any) -> None:
    model.c.register_buffer("own", model.shift)


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
        (["b"], one_weight, "a.weight and c.weight are one tensor, used in two stages"),
        (["b"], one_buffer, "(shift and c.own|c.own and shift) are one tensor"),
        (["b"], lambda m: m.register_forward_hook(print), "the network has hooks"),
        (["d.1"], lambda m: m.d.register_full_backward_hook(print), "d has hooks"),
        (["d.1"], depends_on_data, "what d calls cannot be followed .*let no stage begin inside"),
        (["d.1"], draws, "random numbers are drawn beside the network's modules"),
    ],
)
def test_cuts_that_cannot_be(names: list[str], change: Callable[[Any], object], told: str) -> None:
    network = Alike()
    change(network)
    before = torch.get_rng_state()
    with pytest.raises(RecipeError, match=f"^stages: {told}"):
        cut_stages(network, names)
    assert torch.equal(torch.get_rng_state(), before)


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


def test_what_depends_on_data_or_is_in_another_mode_may_stand_inside_a_stage() -> None:
    alike = Alike()
    depends_on_data(alike)
    alike.c.register_forward_hook(lambda *_: None)
    check_same_bits(alike, ["c", "d"], torch.randn(3, 4), lambda y: y.square().sum())
    # As a frozen batch normalization.
    network = WithOptions()
    network.b.eval()
    check_same_bits(network, ["b"], torch.randn(3, 4), lambda y: y.logits.square().sum())
    assert not cut_stages(network, ["b"])[1].module.get_submodule("b").training


@pytest.mark.parametrize("kind", [nn.Parameter, nn.Buffer])
def test_a_tensor_that_two_stages_use(kind: Any) -> None:
    layers = {"a": nn.Linear(4, 4), "b": nn.Linear(4, 4), "scale": kind(torch.ones(4))}
    network = Composed(lambda m, x: m.b(m.a(x) * m.scale) * m.scale, **layers)
    with pytest.raises(RecipeError, match=r"^stages: scale is used in two stages"):
        cut_stages(network, ["b"])


def halves(m: Any, x: Tensor) -> Any:
    left, right = m.a(x).chunk(2, 1)
    return m.b(left) + right


def test_values_that_share_memory() -> None:
    network = Composed(halves, a=nn.Linear(4, 4), b=nn.ReLU(inplace=True))
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


class Merging(nn.Linear):
    def train(self, mode: bool = True) -> "Merging":
        self.weight.data += -1 if mode else 1
        return super().train(mode)


def test_a_network_whose_train_writes_to_weights_of_other_stages_is_refused() -> None:
    network, words = nn.Sequential(nn.Linear(2, 2), Merging(2, 2)), ParallelConfig(1, stages=["1"])
    check_stages(network, words)
    weight = network.get_parameter("1.weight")
    weight.data = torch.zeros(()).expand(2, 2)  # as of another stage
    with pytest.raises(RecipeError, match=r"^stages: .* raised RuntimeError"):
        check_stages(network, words)


@pytest.mark.parametrize(
    ("title", "name", "cuts"),
    [
        ("AlexNet", "alexnet", ["features.8", "classifier"]),
        ("VGG-16", "vgg16", ["features.17"]),
        ("ResNet-50", "resnet50", ["layer3"]),
        ("GoogLeNet", "googlenet", ["inception4a", "inception5a"]),
    ],
)
def test_the_numbers_of_the_page(title: str, name: str, cuts: list[str]) -> None:
    page = (Path(__file__).parents[3] / "docs/explanation/splitting.md").read_text("utf-8")
    for first in cuts:
        with torch.device("meta"):
            stages = cut_stages(build_model(name), [first])
            given = stages[0].module(torch.randn(1, *MODELS[name].input_CHW))
        weights = [sum(p.numel() for p in each.module.parameters()) for each in stages]
        numbers = [sum(each.numel() for each in tensors_in(given)), *weights]
        line = re.search(rf"^\| {title} \| `{first}`.*$", page, re.MULTILINE)
        assert line is not None
        row = line[0].replace(",", "")
        assert [int(text) for text in re.findall(r"\d{4,}", row)] == numbers
