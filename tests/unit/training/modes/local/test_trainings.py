"""Whole local trainings on one worker: rounds, a stop, and what has gone wrong."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from firecaffe import Recipe, Result, TensorDataset
from firecaffe.data import Batch
from firecaffe.errors import CheckpointError, PreemptedError, RecipeError
from tests.kit.training import data, fit_points, recipe_of_points, record_of


def recipe(folder: Path, words: dict[str, Any], **train: Any) -> Recipe:
    local = {"mode": "local", "replicas": 4, "local_steps": 4, **words}
    recipe = recipe_of_points(folder, local, **train).replace("data.hold_out", 0.0)
    return recipe.replace("checkpoint.every", 4)


def train(folder: Path, words: dict[str, Any], resume: Path | None = None, **more: Any) -> Result:
    return fit_points(recipe(folder, words, **more), resume)


def test_a_training_may_be_made_longer_after_a_whole_round(tmp_path: Path) -> None:
    long = train(tmp_path / "long", {}, steps=20)
    train(tmp_path / "whole", {}, steps=12)
    again = train(tmp_path / "again", {}, tmp_path / "whole", steps=20)
    assert again.state_sha256 == long.state_sha256
    train(tmp_path / "cut", {}, steps=10)
    with pytest.raises(CheckpointError, match=r"at step 10, .* cut short: .* after step 8 and"):
        train(tmp_path / "no", {}, tmp_path / "cut", steps=20)
    for words in ({"overlap_steps": 1}, {"fragments": 2}):
        (name,) = words
        train(tmp_path / name, words, steps=12)
        with pytest.raises(CheckpointError, match=r"train\.steps is 20 in the recipe, 12 in the"):
            train(tmp_path / "not", words, tmp_path / name, steps=20)


@pytest.mark.parametrize(
    ("words", "synchronous", "averages"),
    [({"warm_steps": 3}, 3, 5), ({"warm_epochs": 1}, 10, 3), ({"growth_coefficient": 0.15}, 0, 3)],
)
def test_the_record_tells_of_rounds(
    words: dict[str, Any], synchronous: int, averages: int, tmp_path: Path
) -> None:
    """And the loss falls, from guessing's (1.39)."""
    result = train(tmp_path / "run", words, steps=20)
    losses = [row["loss"] for row in result.history if row["kind"] == "train"]
    assert losses[0] > 1.3 > losses[-1] + 0.1
    row = record_of(tmp_path / "run")["synchrony"]
    counted = {"synchronous_steps": synchronous, "averages": averages}
    assert row == {"replicas": 4, **counted}


class Stopping(TensorDataset):
    """Asks its own process to stop when it is asked for samples so often."""

    def __init__(self, made: TensorDataset, after: int) -> None:
        super().__init__(made.inputs, made.targets, 4)
        self.left = after

    def batch(self, indices: torch.Tensor) -> Batch:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().batch(indices)


def test_a_stop_comes_when_the_state_is_whole(tmp_path: Path) -> None:
    words = {"overlap_steps": 2}
    whole = train(tmp_path / "whole", words)
    stopping = Stopping(data(300, 0), 8 * 14)
    with pytest.raises(PreemptedError, match="a checkpoint is saved"):
        fit_points(recipe(tmp_path / "half", words), train_set=stopping)
    names = sorted(path.name for path in (tmp_path / "half" / "checkpoints").glob("step-*"))
    assert int(names[-1][5:]) % 4 == 2  # rounds of four steps, and two under way
    again = train(tmp_path / "again", words, tmp_path / "half")
    assert again.state_sha256 == whole.state_sha256


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ({"warm_epochs": 5}, "local_steps is 4 after 50 synchronous steps, but .* 40 steps"),
        ({"fragments": 30, "local_steps": 30}, "fragments is 30, but .* 6 parameters that are"),
    ],
)
def test_refused(words: dict[str, Any], line: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=line):
        train(tmp_path / "run", words)
