"""What cannot be split, in one line with the layer's name and what would do."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import firecaffe
from firecaffe.errors import RecipeError
from firecaffe.parallel.split import choose_layers, split_layers
from firecaffe.parallel.split_kinds import KINDS, SPLITS
from tests.unit.parallel.alone import split_alone, split_copy


def network() -> Any:
    model = nn.Module()
    model.features = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2)
    )
    model.classifier = nn.Sequential(nn.Dropout(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))
    return model


WRONG = [
    ({"clasifier.1": "neurons"}, "'clasifier.1' matches no layer.*neurons, as classifier.1"),
    ({"head.*": "neurons"}, "'head.*' matches no layer.*as classifier.1, classifier.3"),
    ({"classifier": "neurons"}, "classifier is no layer but has some; say 'classifier.*'"),
    ({"classifier.0": "neurons"}, "'classifier.0' matches no layer"),
    ({"classifier.*": "columns"}, "'columns'; known are neurons, inputs, filters, channels, rows"),
    (
        {"*": "neurons"},
        "features.0 is a Conv2d.* split by neurons; it can be by filters or channels",
    ),
    ({"classifier.1": "filters"}, "classifier.1 is a Linear.*by filters; .* by neurons or inputs"),
    ({"features.*": "channels"}, "features.1 is a BatchNorm2d.*by channels; it can be by filters"),
]


@pytest.mark.parametrize(("words", "told"), WRONG)
def test_words_that_cannot_be(words: dict[str, str], told: str) -> None:
    with pytest.raises(RecipeError, match=f"^split: .*{told}"):
        choose_layers(network(), words)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            {"classifier.*": "neurons"},
            "classifier.3 has 2 neurons, fewer than 4 .* parts=2 or fewer",
        ),
        ({"features.*": "filters"}, "features.3 has 2 groups, fewer than 4 parts"),
        ({"features.0": "channels"}, "features.0 has 3 channels, fewer than 4 parts"),
    ],
)
def test_too_few_for_the_parts(words: dict[str, str], told: str) -> None:
    model = network()
    with pytest.raises(RecipeError, match=told):
        split_copy(model, words, 4)
    with pytest.raises(RecipeError, match=told):
        firecaffe.split(model, words, parts=4)
    assert not dist.is_initialized()


def test_the_last_pattern_decides() -> None:
    words = {"classifier.*": "neurons", "classifier.3": "inputs"}
    assert choose_layers(network(), words) == {"classifier.1": "neurons", "classifier.3": "inputs"}


def test_every_layer_of_a_word_is_a_known_kind() -> None:
    for by_kind in SPLITS.values():
        assert by_kind.keys() <= KINDS.keys()


class Own(nn.Linear):
    """One of somebody's own, that may do anything."""


def tied(model: Any) -> None:
    model.classifier[3].weight = model.classifier[1].weight


def twice(model: Any) -> None:
    model.again = model.classifier[1]


def hooked(model: Any) -> None:
    model.classifier[1].register_forward_hook(lambda *_: None)


def own(model: Any) -> None:
    model.classifier[1] = Own(8, 6)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (tied, "classifier.1 shares a parameter with classifier.3"),
        (twice, "classifier.1 is again too"),
        (hooked, "classifier.1 has hooks"),
        (own, "classifier.1 is a Own, which cannot be split by neurons; leave it out"),
    ],
)
def test_layers_that_are_more_than_they_seem(change: Callable[[Any], None], told: str) -> None:
    model = network()
    change(model)
    with pytest.raises(RecipeError, match=told):
        choose_layers(model, {"classifier.1": "neurons"})


def test_nothing_is_changed_before_all_is_known() -> None:
    model = network()
    before = copy.deepcopy(model.state_dict())
    for words in (
        {"classifier.1": "neurons", "classifier.3": "neurons"},
        {"features.3": "columns"},
    ):
        with pytest.raises(RecipeError):
            split_alone(model, words, 4)
    assert model.state_dict().keys() == before.keys()
    assert all(map(torch.equal, model.state_dict().values(), before.values()))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"parts": 0}, "parts is 0; it must be a whole number, at least 1"),
        ({"parts": "2"}, "parts is '2'"),
        ({"timeout_s": -1.0}, "timeout_s"),
    ],
)
def test_arguments_that_cannot_be(options: dict[str, Any], told: str) -> None:
    with pytest.raises(RecipeError, match=told):
        firecaffe.split(network(), {"classifier.1": "neurons"}, **options)
    with pytest.raises(RecipeError, match="no layer is named"):
        firecaffe.split(network(), {})


def test_a_layer_that_was_replaced_is_not_used_in_silence() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    kept = model[0]
    group = split_copy(model, {"0": "neurons"}, 2).group
    split_layers(model, {"0": "neurons"}, group)
    with pytest.raises(AttributeError, match="weight"):
        kept(torch.ones(2, 4))


def test_whole_tensors_are_loaded_by_name() -> None:
    model = network()
    split = split_copy(model, {"features.0": "filters", "classifier.1": "inputs"}, 3)
    state = {name: each + 1 for name, each in model.state_dict().items()}
    split.load_whole_state_dict(state)
    found = split.whole_state_dict()
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)
    with pytest.raises(RecipeError, match=r"classifier.1.weight is not in the state"):
        split.load_whole_state_dict({k: v for k, v in state.items() if k != "classifier.1.weight"})
    with pytest.raises(RecipeError, match=r"other is not in the network"):
        split.load_whole_state_dict({**state, "other": torch.ones(1)})
    with pytest.raises(RecipeError, match=r"classifier.1.weight is \(6, 9\).*\(6, 8\)"):
        split.load_whole_state_dict({**state, "classifier.1.weight": torch.ones(6, 9)})
