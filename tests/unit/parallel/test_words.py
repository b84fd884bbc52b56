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
from firecaffe.models.squeezenet import Fire
from firecaffe.parallel.layer_split import choose_layers, replace_layers
from firecaffe.parallel.split_kinds import KINDS, SPLITS
from tests.unit.parallel.alone import group_of, split_copy


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


class Own(nn.Linear):
    """One of somebody's own, that may do anything."""


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda m: setattr(m.classifier[3], "weight", m.classifier[1].weight),
            "classifier.1 shares a parameter with classifier.3",
        ),
        (lambda m: setattr(m, "again", m.classifier[1]), "classifier.1 is again too"),
        (lambda m: m.classifier[1].register_forward_hook(print), "classifier.1 has hooks"),
        (
            lambda m: m.set_submodule("classifier.1", Own(8, 6)),
            "classifier.1 is a Own, which cannot be split by neurons; leave it out",
        ),
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
