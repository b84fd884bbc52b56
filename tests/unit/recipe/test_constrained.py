"""[prune] and [share]: they decide bits, and what cannot be is one line."""

from typing import Any

import pytest

from firecaffe import (
    ExchangeConfig,
    PruneConfig,
    Recipe,
    ShareConfig,
    SynchronyConfig,
    TrainConfig,
)
from firecaffe.compression.config import prune_notes
from firecaffe.errors import RecipeError
from firecaffe.gradients.compressors import COMPRESSORS
from firecaffe.recipe.checked_recipe import check_recipe
from firecaffe.recipe.identity import identity, search_id
from firecaffe.recipe.idle import idle_words

PRUNE, SHARE = PruneConfig({"*": 0.1}), ShareConfig({"*": 4})
GRADUAL = PruneConfig({"*": 0.1}, how="gradual", steps=10)

VALUES: list[tuple[Any, ...]] = [
    ({"*": 4},),
    ({"*": 5},),
    ({"*": 4}, "density"),
    ({"*": 4}, "linear", False),
    ({"*": 4}, "linear", True, "mean"),
]


def test_they_decide_bits_if_they_are_there() -> None:
    without = identity(Recipe(), 10)
    pruned, shared = identity(Recipe(prune=PRUNE), 10), identity(Recipe(share=SHARE), 10)
    assert {*pruned} - {*without} == {
        *("prune.keep", "prune.threshold", "prune.how", "prune.steps", "prune.every"),
        "prune.scope",
    }
    assert {*shared} - {*without} == {
        *("share.bits", "share.start", "share.train", "share.gradient"),
    }
    others = [
        Recipe(),
        Recipe(prune=PRUNE),
        Recipe(prune=PruneConfig({}, {"*": 0.1})),
        *(Recipe(share=ShareConfig(*words)) for words in VALUES),
    ]
    assert len({search_id(each) for each in others}) == len(others)
    assert len({str(identity(each, 10)) for each in others}) == len(others)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ({"prune": PruneConfig({"a": 0.0})}, "prune.keep 'a' is 0.0; it must be above 0 and at"),
        ({"prune": PruneConfig({"a": 1.5})}, "prune.keep 'a' is 1.5; it must be above 0 and at mo"),
        ({"prune": PruneConfig({}, {"a": 0.0})}, "prune.threshold 'a' is 0.0; it must be above 0"),
        (
            {"prune": PruneConfig({"a": 0.1}, every=0)},
            "prune.every is 0; it must be 1 to 10,000,000",
        ),
        (
            {"prune": PruneConfig({"a": 0.1}, steps=-1)},
            "prune.steps is -1; it must be 0 to 10,000,000",
        ),
        ({"share": ShareConfig({"a": 0})}, "share.bits 'a' is 0; it must be 1 to 16"),
        ({"share": ShareConfig({"a": 17})}, "share.bits 'a' is 17; it must be 1 to 16"),
    ],
)
def test_words_that_cannot_be(words: dict[str, Any], line: str) -> None:
    with pytest.raises(RecipeError, match=line):
        check_recipe(Recipe(**words))


def test_words_that_can() -> None:
    for compressor in COMPRESSORS:
        exchange = ExchangeConfig(compressor=compressor)
        check_recipe(Recipe(prune=PRUNE, share=SHARE, exchange=exchange))
    check_recipe(Recipe(prune=GRADUAL, train=TrainConfig(autocast="float16", compile=True)))
    check_recipe(Recipe(prune=PRUNE, synchrony=SynchronyConfig(shares="measured")))


def test_a_training_that_ends_before_its_masks_are_final() -> None:
    assert prune_notes(GRADUAL, 10) == prune_notes(PRUNE, 1) == []
    [note] = prune_notes(GRADUAL, 9)
    assert note.startswith("warning: prune.steps is 10, the training ends after 9, ")


def test_words_without_effect() -> None:
    assert {*idle_words(Recipe(prune=PruneConfig({"a": 0.1}, steps=5, every=7)))} == {
        "prune.steps",
        "prune.every",
    }
    idle = Recipe(prune=PruneConfig(scope="all"), share=ShareConfig(start="random", train=False))
    assert {*idle_words(idle)} == {"prune.scope", "share.start", "share.train"}
    assert not idle_words(Recipe(prune=GRADUAL, share=SHARE))
