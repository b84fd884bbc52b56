"""What is known before any rank is started: an own task is tried, and what GPUs do not take."""

from typing import Any

import pytest
import torch

from firecaffe import DataConfig, ModelConfig, Recipe, TaskConfig, TrainConfig
from firecaffe.errors import OwnCodeError, RecipeError
from firecaffe.parallel.config import ParallelConfig
from firecaffe.training.preflight import preflight
from tests.unit.tasks.test_table import OWN

SMALL: dict[str, Any] = {"model": ModelConfig("lenet"), "data": DataConfig("generated")}
TRAIN = TrainConfig(8, 4, steps=1, device="cpu")


@pytest.mark.parametrize("function", ["loss_fails", "metric_fails"])
def test_an_own_task_is_tried_on_a_sample(function: str) -> None:
    recipe = Recipe(**SMALL, train=TRAIN, task=TaskConfig(f"{OWN}:{function}"))
    state = torch.random.get_rng_state()
    with pytest.raises(OwnCodeError, match=rf"task\.name '{OWN}:{function}'.*LookupError") as told:
        preflight(recipe, 2)
    assert "own.py" in told.value.traceback
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize(("function", "said"), [("two_losses", "one number"), ("nan", "is nan")])
def test_what_an_own_loss_gives_is_looked_at(function: str, said: str) -> None:
    recipe = Recipe(**SMALL, train=TRAIN, task=TaskConfig(f"{OWN}:{function}"))
    with pytest.raises(RecipeError, match=said):
        preflight(recipe, 2)


def test_a_task_that_can_be_learned_passes() -> None:
    preflight(Recipe(**SMALL, train=TRAIN, task=TaskConfig(f"{OWN}:loss_fails_later")), 2)


def test_what_gpus_do_not_take_is_known_before_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """`train.device` is auto: whether there are GPUs is asked of this host."""
    words = ParallelConfig(0, 2, {"fc*": "neurons"}, 2, "one_weird_trick", exchange="in_turn")
    recipe = Recipe(**SMALL, train=TrainConfig(16, 4, steps=1), parallel=words)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RecipeError, match=r"parallel\.exchange in_turn on GPUs"):
        preflight(recipe, 2)
