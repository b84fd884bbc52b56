"""What is known before any rank is started: an own task is tried, and what GPUs do not take."""

from typing import Any

import pytest
import torch

from firecaffe import DataConfig, ModelConfig, Recipe, SynchronyConfig, TaskConfig, TrainConfig
from firecaffe.errors import OwnCodeError, RecipeError
from firecaffe.recipe.checked_recipe import check_recipe
from firecaffe.training.checks import preflight
from tests.unit.tasks.test_table import OWN

SMALL: dict[str, Any] = {"model": ModelConfig("lenet"), "data": DataConfig("generated")}
TRAIN = TrainConfig(8, 4, steps=1, device="cpu")


@pytest.mark.parametrize("function", ["loss_fails", "metric_fails"])
def test_an_own_task_is_tried_on_a_sample(function: str) -> None:
    recipe = Recipe(**SMALL, train=TRAIN, task=TaskConfig(f"{OWN}:{function}"))
    state = torch.random.get_rng_state()
    with pytest.raises(OwnCodeError, match=rf"task\.name '{OWN}:{function}'.*LookupError") as told:
        preflight(check_recipe(recipe), 2)
    assert "own.py" in told.value.traceback
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize(("function", "said"), [("two_losses", "one number"), ("nan", "is nan")])
def test_what_an_own_loss_gives_is_looked_at(function: str, said: str) -> None:
    recipe = Recipe(**SMALL, train=TRAIN, task=TaskConfig(f"{OWN}:{function}"))
    with pytest.raises(RecipeError, match=said):
        preflight(check_recipe(recipe), 2)


def test_a_task_that_can_be_learned_passes() -> None:
    preflight(
        check_recipe(Recipe(**SMALL, train=TRAIN, task=TaskConfig(f"{OWN}:loss_fails_later"))), 2
    )


def test_batch_norm_may_be_estimated() -> None:
    """The look at the shapes, in evaluation, leaves no layer as one that is not trained."""
    train = TrainConfig(8, 4, steps=1, device="cpu", batch_norm_samples=8)
    preflight(check_recipe(Recipe(**{**SMALL, "model": ModelConfig("resnet18")}, train=train)), 2)


def test_what_gpus_do_not_take_is_known_before_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """`train.device` is auto: whether there are GPUs is asked of this host."""
    words = SynchronyConfig("asynchronous", lock="none", clock="real")
    recipe = Recipe(**SMALL, train=TrainConfig(16, 4, steps=1), synchrony=words)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RecipeError, match=r"on GPUs with synchrony\.lock = none"):
        preflight(check_recipe(recipe), 2)
