"""Whole local trainings on one worker: they learn, stop, and say what has gone wrong."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import firecaffe
from firecaffe import (
    CheckpointConfig,
    Recipe,
    Result,
    RunConfig,
    SolverConfig,
    SynchronyConfig,
    TensorDataset,
    TrainConfig,
)
from firecaffe.data import Batch, SampleOrder
from firecaffe.errors import CheckpointError, NotFiniteError, PreemptedError, RecipeError
from tests.unit.training.served.test_trainings import data, network

MODES: dict[str, dict[str, Any]] = {
    "average": {},
    "post-local": {"warm_epochs": 1},
    "slowmo": {"outer": "slowmo", "inner_momentum": "zero"},
    "nesterov": {"outer": "nesterov"},
    "overlap": {"overlap_steps": 2},
    "quadratic rule": {"growth_coefficient": 0.15},
    "fragments": {"outer": "nesterov", "fragments": 2, "overlap_steps": 1},
}


def recipe(folder: Path, words: dict[str, Any], **train: Any) -> Recipe:
    return Recipe(
        train=TrainConfig(32, 4, seed=1, **{"steps": 40, **train}),
        solver=SolverConfig(base_lr=0.05, momentum=0.5, weight_decay=1e-4),
        checkpoint=CheckpointConfig(every=4, keep_last=0),
        run=RunConfig(folder=str(folder), tensorboard=False),
        synchrony=SynchronyConfig("local", **{"replicas": 4, "local_steps": 4, **words}),
    )


def train(folder: Path, words: dict[str, Any], resume: Path | None = None, **more: Any) -> Result:
    made = recipe(folder, words, **more)
    return firecaffe.train(made, network, data(300, 0), data(100, 1), resume=resume)


@pytest.mark.parametrize("name", MODES)
def test_it_learns(name: str, tmp_path: Path) -> None:
    """The loss falls, from guessing's (1.39) to that of a network that tells most points apart."""
    result = train(tmp_path / "run", MODES[name])
    losses = [row["loss"] for row in result.history if row["kind"] == "train"]
    assert len(losses) == 40
    assert losses[0] > 1.3
    assert sum(losses[10:20]) / 10 < 1.2
    assert sum(losses[-10:]) / 10 < 0.85  # BatchNorm over four samples is noise
    assert result.top1 > 0.93


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


def test_the_record_tells_of_rounds(tmp_path: Path) -> None:
    train(tmp_path / "run", {"warm_steps": 3}, steps=10)
    row = json.loads((tmp_path / "run" / "result.json").read_text())["synchrony"]
    assert row == {"replicas": 4, "synchronous_steps": 3, "averages": 2}


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
        firecaffe.train(recipe(tmp_path / "half", words), network, stopping, data(100, 1))
    names = sorted(path.name for path in (tmp_path / "half" / "checkpoints").glob("step-*"))
    assert int(names[-1][5:]) % 4 == 2  # rounds of four steps, and two under way
    again = train(tmp_path / "again", words, tmp_path / "half")
    assert again.state_sha256 == whole.state_sha256


class Broken(TensorDataset):
    """Has one sample that is not finite."""

    def __init__(self, made: TensorDataset, place: int) -> None:
        inputs = made.inputs.clone()
        inputs[place] = float("nan")
        super().__init__(inputs, made.targets, 4)


def test_what_is_not_finite_is_told_with_its_step_and_the_average_stays(tmp_path: Path) -> None:
    place = int(SampleOrder(1, 300, 32, 4).micro_batch(5, 3)[0])
    broken = Broken(data(300, 0), place)
    with pytest.raises(NotFiniteError, match="1 of 4 replicas are not finite") as told:
        firecaffe.train(recipe(tmp_path / "run", {}), network, broken, data(100, 1))
    assert told.value.step == 6
    (saved,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    assert saved.name == "step-00000004"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ({"warm_epochs": 5}, "local_steps is 4 after 50 synchronous steps, but .* 40 steps"),
        ({"replicas": 3}, "replicas is 3 of 8 micro-batches"),
        (
            {"fragments": 30, "local_steps": 30},
            "fragments is 30, but the network has 6 parameters that are trained",
        ),
    ],
)
def test_refused(words: dict[str, Any], line: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=line):
        train(tmp_path / "run", words)
