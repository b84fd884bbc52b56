"""A checkpoint goes on only in a run whose words decide the same bits."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import firecaffe
from firecaffe import DataConfig, ModelConfig, Recipe, RunConfig, TrainConfig
from firecaffe.errors import CheckpointError
from firecaffe.training.checkpoint import Checkpoint, check_identity


def taken() -> Checkpoint:
    words = {"solver.type": "sgd", "solver.stepvalue": [1, 2], "solver.base_lr": 0.1}
    return Checkpoint(step=3, identity=words, probe="p")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"solver.base_lr": 0.2}, "solver.base_lr is 0.2 in the recipe, 0.1 in the checkpoint"),
        ({"solver.stepvalue": [1, 3]}, r"solver.stepvalue is \[1, 3\] in the recipe, \[1, 2\] in"),
        ({"train.steps": 5}, "train.steps is 5 in the recipe, 0 in the checkpoint"),
        ({"solver.base_lr": None}, "solver.base_lr is 0.01 in the recipe, 0.1 in the checkpoint"),
        # The first in the alphabet, however many there are.
        ({"solver.type": "adam", "data.name": "x"}, "data.name is 'x'"),
    ],
)
def test_identity_names_the_word(changes: dict[str, Any], words: str) -> None:
    checkpoint = taken()
    check_identity(checkpoint, dict(checkpoint.identity), checkpoint.step)
    asked = {k: v for k, v in {**checkpoint.identity, **changes}.items() if v is not None}
    with pytest.raises(CheckpointError, match=words):
        check_identity(checkpoint, asked, checkpoint.step)


def test_a_word_that_one_of_the_two_does_not_know_had_its_default() -> None:
    checkpoint = taken()
    younger = {**checkpoint.identity, "model.args": {}, "model.freeze": []}
    check_identity(checkpoint, younger, checkpoint.step)
    with pytest.raises(CheckpointError, match=r"model\.args is \{'width': 3\} in the recipe, \{\}"):
        check_identity(checkpoint, {**younger, "model.args": {"width": 3}}, checkpoint.step)


def test_fewer_steps_than_the_checkpoint_s_are_the_cause_that_is_told() -> None:
    """Not the word train.steps, which may differ besides (cosine)."""
    checkpoint = taken()
    steps = checkpoint.step - 1
    with pytest.raises(
        CheckpointError, match=rf"at step {steps + 1}, the recipe ends at .* {steps};"
    ):
        check_identity(checkpoint, {**checkpoint.identity, "train.steps": steps}, steps)


def test_another_torch_is_told_and_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first micro-batch, by which machines are compared, may come to the same bits with it."""

    def fit(name: str, steps: int, resume: Path | None = None) -> firecaffe.Result:
        recipe = Recipe(
            model=ModelConfig("lenet"),
            data=DataConfig("generated"),
            train=TrainConfig(8, 4, steps=steps, eval_batch_size=1000, device="cpu"),
            run=RunConfig(str(tmp_path / name), tensorboard=False),
        )
        return firecaffe.train(recipe, resume=resume)

    run = fit("run", 1).folder
    same = fit("same", 2, run)
    assert not same.identity_doubts
    environment = json.loads((run / "environment.json").read_text())
    environment |= {"torch": "2.1.0", "cpu_capability": environment["cpu_capability"]}
    (run / "environment.json").write_text(json.dumps(environment))
    capsys.readouterr()
    other = fit("other", 2, run)
    [doubt] = other.identity_doubts
    for part in ("step 1", "torch 2.1.0", torch.__version__, "bits may differ"):
        assert part in doubt
    assert f"warning: {doubt}" in capsys.readouterr().out
    assert json.loads((other.folder / "result.json").read_text())["identity_doubts"] == [doubt]
    assert other.weights_sha256 == same.weights_sha256
