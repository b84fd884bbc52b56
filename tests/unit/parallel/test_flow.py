"""What stands between layers that are split: values, and where parts stay parts."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from firecaffe.caffe.local_response_norm import LocalResponseNorm
from firecaffe.cluster.group import Group
from firecaffe.errors import RecipeError
from firecaffe.models.googlenet import Inception
from firecaffe.models.known_networks import MODELS, build_model
from firecaffe.models.resnet import Bottleneck
from firecaffe.parallel import halo
from firecaffe.parallel.layers_in_parts import SplitLayer
from firecaffe.parallel.parts import PartGroup
from firecaffe.parallel.tensor import TensorInParts, whole
from tests.unit.parallel.alone import compare, split_copy

STAY: dict[str, nn.Module] = {
    "relu": nn.ReLU(),
    "relu in place": nn.ReLU(inplace=True),
    "gelu": nn.GELU(),
    "sigmoid": nn.Sigmoid(),
    "tanh": nn.Tanh(),
    "hardswish": nn.Hardswish(inplace=True),
    "leaky": nn.LeakyReLU(0.1),
    "identity": nn.Identity(),
    "max pool": nn.MaxPool2d(3, 2, ceil_mode=True),
    "average pool": nn.AvgPool2d(3, 2, padding=1, ceil_mode=True),
    "adaptive pool": nn.AdaptiveAvgPool2d(2),
    "adaptive max pool": nn.AdaptiveMaxPool2d((1, 2)),
    "flatten": nn.Flatten(),
    "flatten rows": nn.Flatten(2),
    "dropout": nn.Dropout(0.5),
    "dropout in place": nn.Dropout(0.3, inplace=True),
    "lrn": LocalResponseNorm(3),
    "torch's lrn": nn.LocalResponseNorm(3),
}
GATHERED: dict[str, nn.Module] = {
    "softmax": nn.Softmax(1),
    "prelu": nn.PReLU(7),
    "whole batch norm": nn.BatchNorm2d(7),
    "layer norm": nn.LayerNorm([7, 5, 5]),
    "flatten all": nn.Flatten(0),
    "whole convolution": nn.Conv2d(7, 3, 3),
    "dropout of channels": nn.Dropout2d(0.5),
    "places of the largest": nn.MaxPool2d(2, return_indices=True),
}


class Between(nn.Module):
    """A convolution, then what is asked for."""

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 7, 3, padding=1)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        y = self.between(self.conv(x))
        first: Tensor = y[0] if isinstance(y, tuple) else y
        return first


@pytest.mark.parametrize("name", [*STAY, *GATHERED])
def test_what_stands_behind_a_split_layer(name: str) -> None:
    torch.manual_seed(0)
    model = Between({**STAY, **GATHERED}[name]).double()
    x = torch.randn(3, 2, 5, 5).double()
    split = compare(model, {"conv": "filters"}, 3, x)
    inner = split.module(x)
    assert isinstance(inner, TensorInParts) == (name in STAY), name
    if name in STAY:
        assert inner.shape == model(x).shape == whole(inner).shape
        assert len(inner.own) == 3


class Residual(nn.Module):
    """Sums and views as people write them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self.last = nn.Linear(6 * 4, 3)
        self.scale = nn.Parameter(torch.rand(6, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x) * self.scale
        z = self.second(F.relu(y))
        z += y  # whole, for a whole tensor has scaled it
        z += z
        z = 1 - F.max_pool2d(z * 2 + 1, 2) / 3
        z.relu_()
        logits: Tensor = self.last(z.view(z.size(0), -1))
        return logits


def test_sums_of_parts_and_views() -> None:
    model, x = Residual().double(), torch.randn(3, 2, 4, 4).double()
    compare(model, {"first": "filters", "second": "filters", "last": "inputs"}, 2, x)
    compare(model, {"first": "filters", "second": "filters"}, 3, x)
    compare(model, {"second": "channels", "last": "neurons"}, 3, x)


class Headed(nn.Module):
    """Paths that are put together by channel, and a head that exists in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 6, 3, padding=1)
        self.inception = Inception(6, (4, 3, 6, 2, 3, 5), batch_norm=True)
        self.block = Bottleneck(18, 5, 2)
        self.head, self.fc = nn.Linear(18, 3), nn.Linear(20, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.inception(F.relu(self.stem(x), inplace=True))
        logits = self.fc(self.block(y).mean((2, 3)))
        return (logits, self.head(y.mean((2, 3)))) if self.training else (logits,)


@pytest.mark.parametrize(
    "words",
    [
        {"stem": "filters", "*conv*": "filters"},
        {"*branch?*conv": "filters", "*bn*": "filters", "*.conv2": "channels", "fc": "inputs"},
        {"*branch3.1.conv": "channels", "block.downsample.*": "filters", "head": "neurons"},
    ],
)
def test_a_network_with_paths_a_shortcut_and_a_head_of_training(words: dict[str, str]) -> None:
    torch.manual_seed(0)
    model = Headed().double()
    split = split_copy(model, words, 2)
    compare(model, words, 2, torch.randn(3, 2, 6, 6).double(), lambda outputs: torch.cat(outputs))
    x = torch.randn(3, 2, 6, 6).double()
    assert len(split(x)) == 2
    assert len(split.eval()(x)) == 1


@pytest.mark.parametrize(
    "view",
    [
        lambda y: y.view(y.size(0), -1),
        lambda y: y.view(-1, 6 * 9),
        lambda y: y.reshape((2, 54)),
        lambda y: torch.flatten(y, 1),
        lambda y: y.view(y.shape).flatten(1),
        lambda y: y.reshape(shape=(2, 54)),
        lambda y: y.view(2, 18, 3).flatten(1),
        lambda y: y.view(-1, 27).view(2, 54),
        lambda y: y.permute(1, 0, 2, 3).transpose(0, 1).flatten(1),
    ],
)
def test_views_before_a_linear_layer(view: Any) -> None:
    class Viewed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.fc = nn.Conv2d(2, 6, 3), nn.Linear(54, 4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.fc(view(self.conv(x)))
            return y

    words = {"conv": "filters", "fc": "inputs"}
    split = compare(Viewed().double(), words, 3, torch.randn(2, 2, 5, 5).double())
    with torch.inference_mode():
        assert split(torch.randn(2, 2, 5, 5).double()).shape == (2, 4)


def test_the_pair_of_neurons_and_inputs_needs_one_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_exchanges(monkeypatch)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 5))
    split = split_copy(model, {"0": "neurons", "3": "inputs"}, 4)
    x = torch.randn(3, 6, requires_grad=True)
    split(x).sum().backward()
    assert calls == ["sum", "sum"]  # forward, backward
    calls.clear()
    split_copy(model, {"0": "neurons", "3": "neurons"}, 4)(x).sum().backward()
    assert calls == ["gather", "gather", "sum_own", "sum"]


def test_parts_of_convolutions_go_on_into_linear_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_exchanges(monkeypatch)
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=4)),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 4, 5)),
    )
    words = {"0": "filters", "1": "filters", "3": "filters", "6": "inputs"}
    split_copy(model, words, 4)(torch.randn(2, 3, 8, 8)).sum().backward()
    assert calls == ["sum"]  # of the outputs; the first layer's input wants no gradient


def test_parts_that_are_cut_otherwise_are_cut_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Conv2d(3, 10, 3), nn.ReLU(), nn.Flatten(), nn.Linear(90, 5)).double()
    words = {"0": "filters", "3": "inputs"}
    x = torch.randn(2, 3, 5, 5).double()
    compare(model, words, 4, x)  # 2, 3, 2 and 3 filters of 9, against 22, 23, 22 and 23 inputs
    calls = count_exchanges(monkeypatch)
    split_copy(model, words, 4)(x).sum().backward()
    assert calls == ["gather", "sum", "gather"]


def test_parts_have_memory_of_their_own() -> None:
    group = PartGroup(Group(0, 1, torch.device("cpu")), 3)
    x = torch.randn(1, 9)
    for part in group.slice(x, (0, 3, 6, 9), 1):
        assert part.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
        assert part.is_contiguous()


PAGE = (Path(__file__).parents[3] / "docs" / "parallel.md").read_text()
PAIR = {"classifier.*": "neurons", "classifier.3": "inputs"}


@pytest.mark.parametrize(
    ("network", "words"),
    [
        ("alexnet", {"classifier.*": "neurons"}),
        ("alexnet", PAIR),
        ("vgg16", PAIR),
        ("alexnet_ungrouped", {"features.*": "filters"}),
        ("vgg16", {"features.*": "filters"}),
    ],
)
def test_the_page_has_what_travels(
    network: str, words: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    travels = []
    for name, times in (("sum", 2), ("sum_own", 1), ("gather", 1)):
        own = getattr(PartGroup, name)

        def counted(self: PartGroup, *of: Any, own: Any = own, times: int = times) -> Any:
            result = own(self, *of)
            results = [result] if isinstance(result, Tensor) else result
            travels.append(times * sum(each.numel() for each in results))
            return result

        monkeypatch.setattr(PartGroup, name, counted)
    exchange = halo._exchange

    def halos(group: PartGroup, pieces: Any, known: Any, *of: Any, **back: Any) -> Any:
        between = [each for each in pieces if each.source != each.window]
        travels.append(sum(known[each].numel() for each in between) // (group.num_parts - 1))
        return exchange(group, pieces, known, *of, **back)

    monkeypatch.setattr(halo, "_exchange", halos)
    with torch.device("meta"):
        model = build_model(network)
    split = split_copy(model, words, 4)
    shape = MODELS[network].input_CHW
    split(torch.empty(1, *shape, device="meta")).sum().backward()
    of_split = [name for name, each in split.named_modules() if isinstance(each, SplitLayer)]
    weights = sum(
        each.numel() for name, each in split.named_parameters() if name.startswith(tuple(of_split))
    )
    row = f"| {weights:,} | {sum(travels):,} | {2 * weights // sum(travels):,} |"
    assert row in PAGE


def test_what_several_want_whole_is_gathered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_exchanges(monkeypatch)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.one, self.two = nn.Linear(4, 6), nn.Linear(6, 2), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            with torch.no_grad():
                y.mean()
            both: Tensor = self.one(y) + self.two(y)
            return both

    model, x = Two().double(), torch.randn(3, 4).double()
    compare(model, {"first": "neurons"}, 2, x)
    calls.clear()
    split_copy(model, {"first": "neurons"}, 2)(x)
    assert calls == ["gather"] * 2  # one without a gradient


def count_exchanges(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []
    for name in ("sum", "sum_own", "gather"):
        own = getattr(PartGroup, name)

        def counted(self: PartGroup, *of: Any, name: str = name, own: Any = own) -> Any:
            calls.append(name)
            return own(self, *of)

        monkeypatch.setattr(PartGroup, name, counted)
    return calls


class OwnFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def test_what_cannot_be_followed_is_told_with_the_layer() -> None:
    x = torch.randn(3, 4)

    class Own(nn.Module):
        def __init__(self, use: Any) -> None:
            super().__init__()
            self.first, self.use = nn.Linear(4, 6), use

        def forward(self, x: Tensor) -> Any:
            return self.use(self.first(x))

    split = split_copy(Own(OwnFunction.apply), {"first": "neurons"}, 2)
    with pytest.raises(RecipeError, match=r"output of first is in parts.*leave first out"):
        split(x).sum().backward()
    split = split_copy(Own(lambda y: y.clamp_(0)), {"first": "neurons"}, 2)
    with pytest.raises(RecipeError, match=r"clamp_ is called on the output of first itself"):
        split(x)
    split = split_copy(Own(lambda y: y.register_hook(print)), {"first": "neurons"}, 2)
    with pytest.raises(RecipeError, match=r"register_hook is called on the output of first itself"):
        split(x)
    split = split_copy(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)), {"1": "inputs"}, 2)
    with pytest.raises(RecipeError, match="1 takes 6 inputs; it was given 4"):
        split.get_submodule("module.1")(x)


def test_a_second_derivative_is_refused() -> None:
    split = split_copy(nn.Sequential(nn.Linear(4, 6), nn.Tanh()), {"0": "neurons"}, 2)
    x = torch.randn(3, 4, requires_grad=True)
    (slope,) = torch.autograd.grad(split(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()  # type: ignore[no-untyped-call]


def test_what_other_tools_make_of_it() -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(54, 4))
    split = split_copy(model, {"0": "filters", "3": "inputs"}, 3)
    x = torch.randn(2, 3, 5, 5)
    expected = split(x)
    assert torch.equal(torch.compile(split, backend="eager")(x), expected)
    again = checkpoint(split, x, use_reentrant=False)
    assert torch.equal(again, expected)
    again.sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        assert split(x).dtype == model(x).dtype == torch.bfloat16
    averaged = AveragedModel(split)
    averaged.update_parameters(split)
    assert torch.equal(averaged(x), expected)
