"""Which layers can be split, what is told of others, and modules whose paths go to parts."""

import copy
from collections.abc import Callable
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import firecaffe
from firecaffe import ParallelConfig
from firecaffe.errors import RecipeError
from firecaffe.models.googlenet import Inception, googlenet
from firecaffe.models.known_networks import build_model
from firecaffe.models.squeezenet import Fire, squeezenet1_1
from firecaffe.parallel.cut import balanced
from firecaffe.parallel.layer_split import choose_layers, replace_layers
from firecaffe.parallel.split_kinds import KINDS, SPLITS, ByPaths
from firecaffe.parallel.tensor import TensorInParts
from firecaffe.training.parallel.split_network import chosen_layers
from tests.kit.training_modules import Composed
from tests.unit.parallel.alone import compare, group_of, split_copy

# --- words ----------------------------------------------------------------------------------------


def network() -> Any:
    model = nn.Module()
    model.features = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2)
    )
    model.classifier = nn.Sequential(nn.Dropout(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))
    return model


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ({"clasifier.1": "neurons"}, "'clasifier.1' matches no layer.*neurons, as classifier.1"),
        ({"head.*": "neurons"}, "'head.*' matches no layer.*as classifier.1, classifier.3"),
        ({"classifier": "neurons"}, "classifier is no layer but has some; say 'classifier.*'"),
        ({"classifier.0": "neurons"}, "'classifier.0' matches no layer"),
        ({"classifier.*": "columns"}, "'columns'; known are neurons, inputs, filters, channels"),
        ({"*": "neurons"}, "features.0 is a Conv2d.* by neurons; it can be by filters or channels"),
        ({"classifier.1": "filters"}, "classifier.1 is a Linear.*by filters; .* neurons or inputs"),
        ({"features.*": "channels"}, "features.1 is a BatchNorm2d.*; it can be by filters"),
    ],
)
def test_words_that_cannot_be(words: dict[str, str], told: str) -> None:
    with pytest.raises(RecipeError, match=f"^split: .*{told}"):
        choose_layers(network(), words)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ({"classifier.*": "neurons"}, "classifier.3 has 2 neurons, fewer than 4 .* parts=2"),
        ({"features.*": "filters"}, "features.3 has 2 groups, fewer than 4 parts"),
        ({"features.0": "channels"}, "features.0 has 3 channels, fewer than 4 parts"),
        # Nothing is changed before all is known.
        ({"classifier.1": "neurons", "classifier.3": "neurons"}, "classifier.3 has 2 neurons"),
    ],
)
def test_too_few_for_the_parts(words: dict[str, str], told: str) -> None:
    model = network()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RecipeError, match=told):
        firecaffe.adapt.split_layers(model, words, parts=4)
    assert not dist.is_initialized()
    assert model.state_dict().keys() == before.keys()
    assert all(map(torch.equal, model.state_dict().values(), before.values()))


def test_the_last_pattern_decides_among_known_kinds() -> None:
    words = {"classifier.*": "neurons", "classifier.3": "inputs"}
    assert choose_layers(network(), words) == {"classifier.1": "neurons", "classifier.3": "inputs"}
    assert all(by_kind.keys() <= KINDS.keys() for by_kind in SPLITS.values())


TRICK = ParallelConfig(0, 2, scheme="one_weird_trick")


def test_one_weird_trick_takes_fully_connected_layers_in_turns() -> None:
    with torch.device("meta"):
        alexnet = build_model("alexnet", num_classes=10)
    words = "inputs", "neurons", "inputs"
    named = zip((f"classifier.{number}" for number in (0, 3, 6)), words, strict=True)
    assert chosen_layers(alexnet, TRICK) == dict(named)
    widening = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    assert chosen_layers(widening, TRICK) == {"0": "neurons", "2": "inputs"}


def test_one_weird_trick_wants_a_fully_connected_layer() -> None:
    with pytest.raises(RecipeError, match=r"the network has no fully connected layer"):
        chosen_layers(nn.Sequential(nn.Conv2d(1, 2, 3)), TRICK)
    words = ParallelConfig(0, 2, {"0": "filters"}, scheme="one_weird_trick")
    with pytest.raises(RecipeError, match=r"has 0 by filters: one_weird_trick splits fully"):
        chosen_layers(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Linear(2, 2)), words)


class Own(nn.Linear):
    """One of somebody's own, that may do anything."""


def one_weight(model: Any) -> None:
    model.classifier[3].weight = model.classifier[1].weight


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (one_weight, "classifier.1 shares a parameter with classifier.3"),
        (lambda m: setattr(m, "again", m.classifier[1]), "classifier.1 is again too"),
        (lambda m: m.classifier[1].register_forward_hook(print), "classifier.1 has hooks"),
        (lambda m: m.classifier[1].weight.register_hook(print), "classifier.1 has hooks"),
        (
            lambda m: m.classifier[1].bias.register_post_accumulate_grad_hook(print),
            "classifier.1 has hooks",
        ),
        (lambda m: m.set_submodule("classifier.1", Own(8, 6)), "1 is a Own, which cannot be split"),
    ],
)
def test_layers_that_are_more_than_they_seem(change: Callable[[Any], object], told: str) -> None:
    model = network()
    change(model)
    with pytest.raises(RecipeError, match=told):
        choose_layers(model, {"classifier.1": "neurons"})


@pytest.mark.parametrize(
    ("layer", "word", "gone"),
    [(nn.Linear(4, 4), "neurons", "weight"), (Fire(4, 3, 5), "paths", "squeeze")],
)
def test_a_replaced_layer_is_not_used_in_silence(layer: nn.Module, word: str, gone: str) -> None:
    replace_layers(nn.Sequential(layer), {"0": word}, group_of(2))
    with pytest.raises(AttributeError, match=gone):
        layer(torch.ones(1, 4, 4, 4))


def test_whole_tensors_are_loaded_by_name() -> None:
    model = network()
    model.fire = Fire(6, 3, 5)
    words = {"features.0": "filters", "classifier.1": "inputs", "fire": "paths"}
    split = split_copy(model, words, 2)
    state = {name: each + 1 for name, each in model.state_dict().items()}
    split.load_whole_state_dict(state)
    loaded = split.whole_state_dict()
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[name], state[name]) for name in state)
    weight = "classifier.1.weight"
    for changed, said in (
        ({name: each for name, each in state.items() if name != weight}, "is not in the state"),
        ({**state, "other": torch.ones(1)}, r"other is not in the network"),
        ({**state, weight: torch.ones(6, 9)}, r"classifier.1.weight is \(6, 9\).*\(6, 8\)"),
        ({**state, "fire.squeeze.weight": torch.ones(1)}, r"is \(1,\); the network's is \(3, 6"),
    ):
        with pytest.raises(RecipeError, match=said):
            split.load_whole_state_dict(changed)


# --- paths ----------------------------------------------------------------------------------------


def inception() -> Inception:
    return Inception(6, (4, 3, 6, 2, 3, 5), batch_norm=False)


class Nested(nn.Module):
    """As torchvision's Inception v3 is written: functions, lists, a path that parts in two."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(6, 4, 1)
        self.stem, self.left = nn.Conv2d(6, 5, 1), nn.Conv2d(5, 3, (1, 3), padding=(0, 1))
        self.right = nn.Conv2d(5, 3, (3, 1), padding=(1, 0))
        self.pool = nn.Conv2d(6, 2, 1, bias=False)

    def _forward(self, x: Tensor) -> list[Tensor]:
        stem = F.relu(self.stem(x), inplace=True)
        both = torch.cat([self.left(stem), self.right(stem)], 1)
        return [F.relu(self.one(x)), both, self.pool(F.avg_pool2d(x, 3, 1, 1)), x]

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(self._forward(x), 1)


class Siamese(nn.Module):
    """Two inputs, each with a path of its own, and a third path that takes both."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        self.right, self.gate = nn.Linear(7, 4), nn.Linear(13, 5)

    def forward(self, x: Tensor, y: Tensor, scale: float = 0.5) -> Tensor:
        gate = torch.sigmoid(self.gate(torch.cat([x, y], -1))) * scale
        return torch.cat(tensors=(self.left(x), self.right(y), gate), dim=-1)


@pytest.mark.parametrize(
    "module",
    [
        inception(),
        Inception(6, (4, 3, 6, 2, 3, 5), batch_norm=True, large_kernel_size=3),
        Fire(6, 3, 5),
        Nested(),
    ],
    ids=["inception", "inception with batch norm", "fire", "nested"],
)
def test_paths_in_one_to_four_parts(module: nn.Module) -> None:
    torch.manual_seed(0)
    paths = 2 if isinstance(module, Fire) else 4
    channels = 10 if isinstance(module, Fire) else 18
    norm, last = nn.LocalResponseNorm(5, 0.3), nn.Conv2d(channels, 3, 3)
    model = nn.Sequential(nn.Conv2d(2, 6, 3), module, nn.ReLU(), nn.MaxPool2d(3, 1), norm, last)
    for num_parts in range(1, paths + 1):
        split = compare(model, {"1": "paths", "5": "channels"}, num_parts, (3, 2, 8, 8))
        inner = split.get_submodule("module.1")
        assert isinstance(inner, ByPaths)
        assert isinstance(inner(torch.randn(3, 6, 8, 8).double()), TensorInParts)
    with pytest.raises(RecipeError, match=f"1 has {paths} paths, fewer than 5 parts"):
        split_copy(model, {"1": "paths"}, 5)


def test_paths_of_several_inputs() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        return m.fc(torch.tanh(m.towers(x[:, :6], y=x[:, 6:], scale=0.7)))

    model = Composed(forward, towers=Siamese(), fc=nn.Linear(12, 2))
    for num_parts in (1, 2, 3):
        compare(model, {"towers": "paths", "fc": "inputs"}, num_parts, (4, 13))


def test_the_first_module_of_a_network_and_frozen_paths() -> None:
    """A path without a gradient goes backward too: other ranks wait for it."""
    model = nn.Sequential(Nested(), nn.Conv2d(18, 2, 1)).double()
    for name in ("0.one.weight", "0.one.bias"):
        model.get_parameter(name).requires_grad_(False)
    split = split_copy(model, {"0": "paths"}, 4)
    inner = split.get_submodule("module.0")(torch.randn(2, 6, 5, 5).double())
    assert all(each.requires_grad for each in inner.own)
    with torch.no_grad():
        inner = split.get_submodule("module.0")(torch.randn(2, 6, 5, 5).double())
    assert not any(each.requires_grad for each in inner.own)


def test_paths_of_our_networks() -> None:
    with torch.device("meta"):
        models: list[Any] = [googlenet(), squeezenet1_1()]
    models[1].features[0] = nn.Identity()  # a convolution, which is no paths
    for model, pattern, count in zip(models, ("inception*", "features.*"), (9, 8), strict=True):
        assert list(choose_layers(model, {pattern: "paths"}).values()) == ["paths"] * count


def test_runs_of_paths_are_balanced() -> None:
    for costs in ([1, 1, 1, 9], [5, 1, 1, 1, 4], [0, 0, 3], [2, 7, 1, 8, 2, 8]):
        for num_parts in range(1, len(costs) + 1):
            ends = balanced(costs, num_parts)

            def cost(inner: tuple[int, ...], costs: list[int] = costs) -> int:
                all_ends = (0, *inner, len(costs))
                return max(sum(costs[a:b]) for a, b in pairwise(all_ends))

            every = combinations(range(1, len(costs)), num_parts - 1)
            assert cost(ends[1:-1]) == min(map(cost, every))


class Wrong(nn.Module):
    def __init__(self, do: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.left, self.right, self.drop = nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout()
        self.do = do

    def forward(self, x: Tensor) -> Any:
        return self.do(self, x)


@pytest.mark.parametrize(
    ("do", "told"),
    [
        (lambda m, x: m.left(x) + m.right(x), "does not return a torch.cat of paths"),
        (lambda m, x: torch.cat([m.left(m.right(x))]), "torch.cat is not one of a list of paths"),
        (lambda m, x: torch.cat([m.left(x), m.left(-x)]), "its paths share weights"),
        (lambda m, x: torch.cat([m.left(x), x]), "weights that its forward does not use"),
        (lambda m, x: torch.cat([m.left(x), m.right(m.drop(x))]), r"random numbers \(Dropout\)"),
        (lambda m, x: torch.cat([m.left(x), m.right(F.dropout(x))]), r"random numbers \(dropout\)"),
        (lambda m, x: torch.cat([m.left(x), m.right(x * m.training)]), "another one in training"),
        (lambda m, x: torch.cat([m.left(x), x] if x.sum() > 0 else []), "cannot be traced"),
    ],
)
def test_modules_that_are_not_made_of_paths(do: Callable[[Any, Any], Any], told: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Wrong(do))
    with pytest.raises(RecipeError, match=f"split: 1 cannot be split by paths: .*{told}"):
        choose_layers(model, {"1": "paths"})
    assert model[1].training


def test_words_for_paths_and_for_what_is_inside() -> None:
    model: Any = nn.Sequential(inception(), nn.Linear(4, 4))
    with pytest.raises(RecipeError, match=r"0.branch1.conv is in 0, which is split by paths"):
        choose_layers(model, {"0": "paths", "*.branch1.conv": "filters"})
    with pytest.raises(RecipeError, match=r"1 is a Linear, which cannot be split by paths"):
        choose_layers(model, {"*": "paths"})
    assert choose_layers(model, {"0*": "paths", "1": "inputs"}) == {"0": "paths", "1": "inputs"}
    model[1].weight = model[0].branch1.conv.weight
    with pytest.raises(RecipeError, match="0 shares a parameter with 1"):
        choose_layers(model, {"0": "paths"})
