"""Numbers of a recipe that do not fit each other, or the workers that there are."""

import re
from typing import Any

import pytest

from firecaffe import Recipe
from firecaffe.errors import RecipeError
from firecaffe.recipe.checked_recipe import check_recipe
from firecaffe.recipe.fits import FITS
from firecaffe.recipe.terms import DEFAULTS
from firecaffe.recipe.worker_numbers import WORKERS_FIT, check_ranks
from tests.unit.recipe.test_sections import changed


def of(words: dict[str, Any]) -> Recipe:
    recipe = Recipe()
    for word, value in words.items():
        recipe = changed(recipe, word, value)
    return recipe


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            {"train.global_batch_size": 100, "train.micro_batch_size": 16},
            "train.global_batch_size is 100, which is no multiple of train.micro_batch_size, 16",
        ),
        ({"train.global_batch_size": 8}, "train.global_batch_size is 8, which is no multiple"),
        (
            {"train.global_batch_size": 2**24, "train.micro_batch_size": 1},
            "16,777,216 a step; there may be at most 1,048,576",
        ),
        ({"train.batch_norm_samples": 15}, "train.batch_norm_samples is 15; it must be 0, or at l"),
        ({"data.augment": "inception"}, "data.augment is inception with data.crop 0"),
        (
            {"train.micro_batch_size": 1, "data.mixup": 0.2},
            "data.mixup is 0.2 with train.micro_batch_size 1",
        ),
        (
            {
                "solver.lr_policy": "one_cycle",
                "solver.momentum": 0.8,
                "solver.base_momentum": 0.85,
            },
            "solver.base_momentum is 0.85; it must be at most solver.momentum, 0.8",
        ),
        ({"solver.scale": "linear"}, "reference_batch_size 0; give the global batch that base_lr"),
        (
            {"exchange.compressor": "int8", "exchange.compressor_level": 4},
            "the tree over 8 micro-batches ends at level 3",
        ),
    ],
)
def test_numbers_that_do_not_fit(words: dict[str, Any], line: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(line)):
        check_recipe(of(words))


def test_as_many_ranks_as_micro_batches() -> None:
    recipe = Recipe()
    assert recipe.train.num_micro_batches == 8
    for world_size in range(1, 9):
        check_ranks(recipe, world_size, world_size, on_gpus=False)
    with pytest.raises(RecipeError, match="9 ranks but only 8 micro-batches") as caught:
        check_ranks(recipe, 9, 9, on_gpus=False)
    for word in ("train.global_batch_size 128", "train.micro_batch_size 16", "at most 8 ranks"):
        assert word in str(caught.value)


def test_each_row_names_words_that_there_are() -> None:
    for row in (*FITS, *WORKERS_FIT):
        assert set(row.words) <= DEFAULTS.keys()
