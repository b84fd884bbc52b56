"""What stands between layers that are split: values, and where parts stay parts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from firecaffe.caffe.local_response_norm import LocalResponseNorm
from firecaffe.errors import RecipeError
from firecaffe.models.googlenet import Inception
from firecaffe.models.known_networks import MODELS, build_model
from firecaffe.models.resnet import Bottleneck
from firecaffe.parallel import rows
from firecaffe.parallel.flow import PartGroup
from firecaffe.parallel.layers_in_parts import SplitLayer
from firecaffe.parallel.tensor import TensorInParts, whole
from tests.kit.training_fixtures import Patch
from tests.kit.training_modules import Composed
from tests.unit.parallel.alone import compare, group_of, split_copy

STAY = [
    *(nn.ReLU(), nn.ReLU(inplace=True), nn.GELU(), nn.Sigmoid(), nn.Tanh(), nn.Identity()),
    *(nn.Hardswish(inplace=True), nn.LeakyReLU(0.1), nn.MaxPool2d(3, 2, ceil_mode=True)),
    *(nn.AvgPool2d(3, 2, padding=1, ceil_mode=True), nn.AdaptiveAvgPool2d(2)),
    *(nn.AdaptiveMaxPool2d((1, 2)), nn.Flatten(), nn.Flatten(2), nn.Dropout(0.5)),
    *(nn.Dropout(0.3, inplace=True), LocalResponseNorm(3), nn.LocalResponseNorm(3)),
]
GATHERED = [
    *(nn.Softmax(1), nn.PReLU(7), nn.BatchNorm2d(7), nn.LayerNorm([7, 5, 5]), nn.Flatten(0)),
    *(nn.Conv2d(7, 3, 3), nn.Dropout2d(0.5), nn.MaxPool2d(2, return_indices=True)),
]


def first(y: Any) -> Any:
    return y[0] if isinstance(y, tuple) else y


@pytest.mark.parametrize("between", [*STAY, *GATHERED], ids=str)
def test_what_stands_behind_a_split_layer(between: nn.Module) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 7, 3, padding=1)
    model = Composed(lambda m, x: first(m.between(m.conv(x))), conv=conv, between=between)
    x = torch.randn(3, 2, 5, 5).double()
    split = compare(model, {"conv": "filters"}, 3, x)
    inner = split.module(x)
    assert isinstance(inner, TensorInParts) == (between in STAY)
    if between in STAY:
        assert inner.shape == model(x).shape == whole(inner).shape
        assert len(inner.own) == 3


def residual(m: Any, x: Tensor) -> Any:
    y = m.first(x) * m.scale
    z = m.second(F.relu(y))
    z += y  # whole, for a whole tensor has scaled it
    z += z
    z = 1 - F.max_pool2d(z * 2 + 1, 2) / 3
    z.relu_()
    return m.last(z.view(z.size(0), -1))


@pytest.mark.parametrize(
    ("words", "num_parts"),
    [
        ({"first": "filters", "second": "filters", "last": "inputs"}, 2),
        ({"first": "filters", "second": "filters"}, 3),
        ({"second": "channels", "last": "neurons"}, 3),
    ],
)
def test_sums_of_parts_and_views(words: dict[str, str], num_parts: int) -> None:
    convolutions = {"first": nn.Conv2d(2, 6, 3, padding=1), "second": nn.Conv2d(6, 6, 3, padding=1)}
    scale = nn.Parameter(torch.rand(6, 1, 1))
    model = Composed(residual, **convolutions, last=nn.Linear(6 * 4, 3), scale=scale)
    compare(model, words, num_parts, (3, 2, 4, 4))


def headed(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    """Paths that are put together by channel, and a head that exists in training alone."""
    y = m.inception(F.relu(m.stem(x), inplace=True))
    logits = m.fc(m.block(y).mean((2, 3)))
    return (logits, m.head(y.mean((2, 3)))) if m.training else (logits,)


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
    inception = Inception(6, (4, 3, 6, 2, 3, 5), batch_norm=True)
    parts = {"stem": nn.Conv2d(2, 6, 3, padding=1), "inception": inception}
    heads = {"head": nn.Linear(18, 3), "fc": nn.Linear(20, 3)}
    model = Composed(headed, **parts, block=Bottleneck(18, 5, 2), **heads)
    split = compare(model, words, 2, (3, 2, 6, 6), lambda outputs: torch.cat(outputs))
    x = torch.randn(3, 2, 6, 6).double()
    assert (len(split(x)), len(split.eval()(x))) == (2, 1)


@pytest.mark.parametrize(
    "view",
    [
        lambda y: y.view(y.size(0), -1),
        lambda y: y.view(-1, 6 * 9),
        lambda y: torch.flatten(y.reshape((2, 54)), 1),
        lambda y: y.view(y.shape).flatten(1),
        lambda y: y.reshape(shape=(2, 54)),
        lambda y: y.view(2, 18, 3).flatten(1),
        lambda y: y.view(-1, 27).view(2, 54),
        lambda y: y.permute(1, 0, 2, 3).transpose(0, 1).flatten(1),
    ],
)
def test_views_before_a_linear_layer(view: Any) -> None:
    layers = {"conv": nn.Conv2d(2, 6, 3), "fc": nn.Linear(54, 4)}
    model = Composed(lambda m, x: m.fc(view(m.conv(x))), **layers)
    split = compare(model, {"conv": "filters", "fc": "inputs"}, 3, (2, 2, 5, 5))
    with torch.inference_mode():
        assert split(torch.randn(2, 2, 5, 5).double()).shape == (2, 4)


def watch_exchanges(monkeypatch: Patch, note: Callable[[str, Any], object]) -> None:
    """note: is given the name of each exchange, and what it came to."""
    for name in ("sum", "sum_own", "gather"):
        own = getattr(PartGroup, name)

        def noted(self: PartGroup, *of: Any, name: str = name, own: Any = own) -> Any:
            result = own(self, *of)
            note(name, result)
            return result

        monkeypatch.setattr(PartGroup, name, noted)


@pytest.fixture
def calls(monkeypatch: Patch) -> list[str]:
    calls: list[str] = []
    watch_exchanges(monkeypatch, lambda name, _: calls.append(name))
    return calls


FC_PAIR = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 5))
CONVOLUTIONS = nn.Sequential(
    *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=4)),
    *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 4, 5)),
)
BY_FILTERS = {"0": "filters", "1": "filters", "3": "filters", "6": "inputs"}
UNEVEN = nn.Sequential(nn.Conv2d(3, 10, 3), nn.ReLU(), nn.Flatten(), nn.Linear(90, 5)).double()


@pytest.mark.parametrize(
    ("model", "words", "x", "exchanges"),
    [
        # One forward, one backward.
        (FC_PAIR, {"0": "neurons", "3": "inputs"}, torch.randn(3, 6), ["sum", "sum"]),
        (
            *(FC_PAIR, {"0": "neurons", "3": "neurons"}, torch.randn(3, 6)),
            ["gather", "gather", "sum_own", "sum"],
        ),
        # Of the outputs; the first layer's input wants no gradient.
        (CONVOLUTIONS, BY_FILTERS, torch.randn(2, 3, 8, 8), ["sum"]),
        # 2, 3, 2 and 3 filters of 9, against 22, 23, 22 and 23 inputs, are cut anew.
        (
            *(UNEVEN, {"0": "filters", "3": "inputs"}, torch.randn(2, 3, 5, 5).double()),
            ["gather", "sum", "gather"],
        ),
    ],
)
def test_which_exchanges_are_needed(
    model: nn.Module, words: dict[str, str], x: Tensor, exchanges: list[str], calls: list[str]
) -> None:
    if model is FC_PAIR:
        x.requires_grad_()
    split_copy(model, words, 4)(x).sum().backward()
    assert calls == exchanges
    if model is UNEVEN:
        compare(model, words, 4, x)


def test_parts_have_memory_of_their_own() -> None:
    x = torch.randn(1, 9)
    for part in group_of(3).slice(x, (0, 3, 6, 9), 1):
        assert part.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
        assert part.is_contiguous()


PAGE = (Path(__file__).parents[3] / "docs/explanation/splitting.md").read_text()
PAIR = {"classifier.*": "neurons", "classifier.3": "inputs"}
TIMES = {"sum": 2, "sum_own": 1, "gather": 1}


@pytest.mark.parametrize(
    ("network", "words"),
    [
        *(("alexnet", {"classifier.*": "neurons"}), ("alexnet", PAIR), ("vgg16", PAIR)),
        ("alexnet_ungrouped", {"features.*": "filters"}),
        ("vgg16", {"features.*": "filters"}),
    ],
)
def test_the_page_has_what_travels(network: str, words: dict[str, str], monkeypatch: Patch) -> None:
    travels = []

    def note(name: str, result: Any) -> None:
        results = [result] if isinstance(result, Tensor) else result
        travels.append(TIMES[name] * sum(each.numel() for each in results))

    watch_exchanges(monkeypatch, note)
    exchange = rows._exchange

    def halos(group: PartGroup, pieces: Any, known: Any, *of: Any, **back: Any) -> Any:
        between = [each for each in pieces if each.source != each.window]
        travels.append(sum(known[each].numel() for each in between) // (group.num_parts - 1))
        return exchange(group, pieces, known, *of, **back)

    monkeypatch.setattr(rows, "_exchange", halos)
    with torch.device("meta"):
        split = split_copy(build_model(network), words, 4)
        split(torch.empty(1, *MODELS[network].input_CHW)).sum().backward()
    layers = [each for each in split.modules() if isinstance(each, SplitLayer)]
    weights = sum(p.numel() for layer in layers for p in layer.parameters())
    row = f"| {weights:,} | {sum(travels):,} | {2 * weights // sum(travels):,} |"
    assert row in PAGE


def two_want(m: Any, x: Tensor) -> Any:
    y = m.first(x)
    with torch.no_grad():
        y.mean()
    return m.one(y) + m.two(y)


def test_what_several_want_whole_is_gathered_once(calls: list[str]) -> None:
    model = Composed(two_want, first=nn.Linear(4, 6), one=nn.Linear(6, 2), two=nn.Linear(6, 2))
    split = compare(model, {"first": "neurons"}, 2, (3, 4))
    calls.clear()
    split(torch.randn(3, 4).double())
    assert calls == ["gather"] * 2  # one without a gradient


class OwnFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (OwnFunction.apply, r"output of first is in parts.*leave first out"),
        (lambda y: y.clamp_(0), r"clamp_ is called on the output of first itself"),
        (lambda y: y.register_hook(print), r"register_hook is called on the output of first itse"),
    ],
)
def test_what_cannot_be_followed_is_told_with_the_layer(use: Any, said: str) -> None:
    model = Composed(lambda m, x: use(m.first(x)), first=nn.Linear(4, 6))
    with pytest.raises(RecipeError, match=said):
        split_copy(model, {"first": "neurons"}, 2)(torch.randn(3, 4)).sum().backward()


def test_inputs_of_another_size_and_a_second_derivative_are_refused() -> None:
    split = split_copy(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)), {"1": "inputs"}, 2)
    with pytest.raises(RecipeError, match="1 takes 6 inputs; it was given 4"):
        split.get_submodule("module.1")(torch.randn(3, 4))
    x = torch.randn(3, 4, requires_grad=True)
    (slope,) = torch.autograd.grad(split(x).square().sum(), x, create_graph=True)
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
