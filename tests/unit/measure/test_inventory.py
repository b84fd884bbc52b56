"""The look at a recipe's network without a training, which `firecaffe check` tells of."""

import pytest
import torch

from firecaffe import DataConfig, Recipe, TrainConfig
from firecaffe.errors import RecipeError
from firecaffe.generators import TORCH
from firecaffe.inventory.loss_trial import MEAN
from firecaffe.measure.inventory import inventory_of
from firecaffe.models.config import ModelConfig
from firecaffe.recipe.checked_recipe import check_recipe
from firecaffe.training.checks import preflight

UNUSUAL = "benchmarks.unusual.cases:"


def recipe(name: str) -> Recipe:
    train = TrainConfig(8, 4, steps=1, device="cpu")
    return Recipe(model=ModelConfig(name), data=DataConfig("generated"), train=train)


def test_a_network_of_ours() -> None:
    found = inventory_of(check_recipe(recipe("nin_small")), torch.device("cpu"))
    assert found.loss == MEAN
    assert found.changes.draws == [TORCH]
    assert found.repeats
    assert not found.doubts
    assert not found.notes
    assert len(found.lines) == 4


def test_what_no_training_keeps_is_known_before_a_rank_is_started() -> None:
    made = recipe(f"{UNUSUAL}complex_buffer")
    with pytest.raises(RecipeError, match="buffer phase is complex64"):
        preflight(check_recipe(made), 2)
    with pytest.raises(RecipeError, match="buffer phase is complex64"):
        inventory_of(check_recipe(made), torch.device("cpu"))
