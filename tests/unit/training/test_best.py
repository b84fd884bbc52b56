"""The best checkpoint and the early stop: what is kept, what is counted on."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import firecaffe
from firecaffe import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    Recipe,
    RunConfig,
    SolverConfig,
    TrainConfig,
)
from firecaffe.cli import main
from firecaffe.runs.measure import LOSS, TOP1
from firecaffe.training.best import Best
from firecaffe.training.checkpoint import best_step, load_newest
from firecaffe.training.evaluate import Evaluation
from tests.unit.training.test_validation import images


def found(value: float, loss: float = 1.0) -> Evaluation:
    return Evaluation(10, loss, {"top1": value}, ["top1"], None)


def test_it_counts_the_evaluations_without_a_better_one() -> None:
    best = Best(TOP1)
    assert best.state_dict() == {}
    assert best.row is None
    values = [0.2, 0.5, 0.5, 0.4, float("nan"), 0.6]
    better = [best.add(step, found(value)) for step, value in enumerate(values, 1)]
    assert better == [True, True, False, False, False, True]
    assert (best.value, best.step, best.without, best.evaluated) == (0.6, 6, 0, 6)
    best.add(7, found(0.1))
    best.add(8, found(0.1))
    assert [best.is_enough(after) for after in (0, 2, 3)] == [False, True, False]
    again = Best(TOP1)
    again.load_state_dict(json.loads(json.dumps(best.state_dict())))
    assert again == best
    # By another metric nothing was found yet.
    other = Best(LOSS)
    other.load_state_dict(best.state_dict())
    assert other == Best(LOSS)


def test_of_equal_values_the_lower_loss_is_the_best_and_then_the_earlier() -> None:
    best = Best(TOP1)
    evaluations = [(0.5, 0.9), (0.5, 0.9), (0.5, 0.8), (0.4, 0.1), (0.5, 0.85), (0.5, float("nan"))]
    better = [best.add(step, found(*each)) for step, each in enumerate(evaluations, 1)]
    assert better == [True, False, True, False, False, False]
    assert (best.step, best.loss) == (3, 0.8)
    # What stops a training is the value alone.
    assert best.without == 5
    # A checkpoint from before knew no loss: the earlier one stays.
    state = best.state_dict()
    del state["loss"]
    older = Best(TOP1)
    older.load_state_dict(state)
    assert not older.add(7, found(0.5, 0.0))
    assert older.add(8, found(0.6, 0.7))
    assert older.loss == 0.7


def test_less_of_a_loss_is_better() -> None:
    best = Best(LOSS)
    losses = (0.5, 0.6, 0.2)
    assert [best.add(step, found(0.0, loss)) for step, loss in enumerate(losses)] == [
        True,
        False,
        True,
    ]


RECIPE = Recipe(
    train=TrainConfig(8, 4, steps=12, eval_every=2, seed=1),
    data=DataConfig(hold_out=0.25),
    # The weights stay as they are, so no evaluation is better than the first.
    solver=SolverConfig(base_lr=0.0, weight_decay=0.0),
    checkpoint=CheckpointConfig(every=1, keep_last=2, best=True),
)


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 2))


def fit(folder: Path, resume: str | None = None, **words: Any) -> firecaffe.Result:
    recipe = replace(
        RECIPE,
        train=replace(RECIPE.train, **words),
        run=RunConfig(str(folder), tensorboard=False),
    )
    return firecaffe.train(recipe, network, images(40, 0), images(30, 1), resume=resume)


def kept(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (folder / "checkpoints").glob("step-*"))


def test_the_best_checkpoint_stays_beside_the_newest(tmp_path: Path) -> None:
    result = fit(tmp_path / "run", steps=7)
    assert kept(tmp_path / "run") == [2, 6, 7]
    best = tmp_path / "run" / "checkpoints" / "best"
    assert load_newest(best)[0].step == 2
    assert load_newest(best.with_name("latest"))[0].step == 7
    assert result.best is not None
    assert result.best["step"] == 2
    assert Path(result.best["checkpoint"]) == best.with_name("step-00000002")
    assert result.best["value"] == result.metrics["top1"] or result.validation is not None
    row = json.loads((tmp_path / "run" / "result.json").read_text())
    assert row["best"] == result.best
    assert (row["stopped_early"], row["evaluated"]) == (False, "weights")
    assert row["test_of_best"] is None
    assert best_step(tmp_path / "run") == 2
    assert best_step(tmp_path) is None


def test_it_stops_once_nothing_gets_better_and_a_resumed_run_counts_on(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", stop_after=3)
    assert (whole.steps, whole.stopped_early) == (8, True)
    # Stopped in between, after two of the three.
    fit(tmp_path / "first", steps=6, stop_after=3)
    rest = fit(tmp_path / "rest", str(tmp_path / "first"), stop_after=3)
    assert (rest.steps, rest.stopped_early) == (8, True)
    assert rest.state_sha256 == whole.state_sha256
    assert rest.best == {
        **(whole.best or {}),
        "checkpoint": str(tmp_path / "first/checkpoints/step-00000002"),
    }
    # At its end there is nothing left to do; with more patience there is.
    assert fit(tmp_path / "over", str(tmp_path / "rest"), stop_after=3).steps == 8
    assert fit(tmp_path / "more", str(tmp_path / "rest"), stop_after=4).steps == 10


def the_first_is_best(best: Best, step: int, evaluation: Evaluation) -> bool:
    """In place of `Best.add`."""
    best.evaluated, is_first = step, best.value is None
    best.without = 0 if is_first else best.without + 1
    if is_first:
        best.value, best.loss, best.step = 0.5, evaluation.loss, step
    return is_first


def test_after_an_early_stop_the_best_weights_are_tested_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And change no bit of what the run comes to."""
    monkeypatch.setattr(Best, "add", the_first_is_best)
    words = {"solver": SolverConfig(base_lr=0.5), "train": replace(RECIPE.train, ema_decay=0.5)}
    recipe = replace(RECIPE, **words)  # type: ignore[arg-type]
    monkeypatch.setattr(f"{__name__}.RECIPE", recipe)
    result = fit(tmp_path / "run", stop_after=2)
    said = capsys.readouterr().out
    assert (result.steps, result.stopped_early) == (6, True)
    row = json.loads((tmp_path / "run" / "result.json").read_text())["test_of_best"]
    assert row == result.test_of_best
    assert f"test of the best weights, of step {row['step']}: " in said
    alone = fit(tmp_path / "alone", steps=row["step"])
    assert (row["loss"], row["top1"]) == (alone.test_loss, alone.metrics["top1"])
    assert row["loss"] != result.test_loss
    without = replace(recipe, checkpoint=replace(recipe.checkpoint, best=False))
    monkeypatch.setattr(f"{__name__}.RECIPE", without)
    last = fit(tmp_path / "without", stop_after=2)
    assert last.test_of_best is None
    assert last.state_sha256 == result.state_sha256


@pytest.mark.parametrize("word", [[], ["--best"]])
def test_evaluate_says_which_weights_it_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], word: list[str]
) -> None:
    folder = tmp_path / "run"
    recipe = Recipe(
        model=ModelConfig("lenet"),
        data=DataConfig("generated", hold_out=0.01),
        train=TrainConfig(4, 4, steps=2, eval_every=1, eval_batch_size=1000),
        solver=SolverConfig(base_lr=0.0),
        checkpoint=CheckpointConfig(best=True),
        run=RunConfig(str(folder), tensorboard=False),
    )
    firecaffe.train(recipe)
    capsys.readouterr()
    assert main(["evaluate", str(folder), *word]) == 0
    said = capsys.readouterr().out.splitlines()
    assert f"at step {1 if word else 2}: " in said[-2]
    assert "--best" in said[-1]
    assert ("newest; --best takes" in said[-1]) == (not word)
    row = json.loads(shown_as_json(capsys, folder, word))
    assert (row["best"], row["best_step"], row["step"]) == (bool(word), 1, 1 if word else 2)


def shown_as_json(capsys: pytest.CaptureFixture[str], folder: Path, word: list[str]) -> str:
    assert main(["evaluate", str(folder), *word, "--json"]) == 0
    return capsys.readouterr().out


def test_a_best_checkpoint_that_is_damaged_costs_the_run_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(tmp_path / "first", steps=6, stop_after=3)
    state = tmp_path / "first" / "checkpoints" / "step-00000002" / "state.safetensors"
    state.write_bytes(state.read_bytes()[:-1])
    result = fit(tmp_path / "rest", str(tmp_path / "first"), stop_after=3)
    assert (result.steps, result.test_of_best) == (8, None)
    assert "the best weights, of step 2, are not tested" in capsys.readouterr().out


def test_the_last_evaluation_may_be_the_best(tmp_path: Path) -> None:
    result = fit(tmp_path / "run", steps=3, eval_every=0)
    assert result.best is not None
    assert result.best["step"] == 3
    assert load_newest(tmp_path / "run" / "checkpoints" / "best")[0].step == 3


@pytest.mark.parametrize(("stop_after", "steps"), [(0, 12), (1, 4)])
def test_no_word_no_stop(tmp_path: Path, stop_after: int, steps: int) -> None:
    assert fit(tmp_path / "run", stop_after=stop_after).steps == steps
