"""Choosing sees the validation samples alone: what is kept as the best, and when a training stops;
the test samples are seen once, at the end.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import firecaffe
from firecaffe import Result
from firecaffe.cli import main
from firecaffe.errors import RecipeError
from firecaffe.runs.curves import curves_of, time_to
from firecaffe.runs.measure import LOSS, TOP1
from firecaffe.runs.run_table import read_run
from firecaffe.training.best import Best
from firecaffe.training.checkpoint import best_step, load_newest
from firecaffe.training.evaluation import Evaluation
from tests.kit.training import images, recipe_in, record_of, rows_of
from tests.kit.training_fixtures import Capture, Patch


def evaluation(value: float, loss: float = 1.0) -> Evaluation:
    return Evaluation(10, loss, {"top1": value}, ["top1"], None)


def test_it_counts_the_evaluations_without_a_better_one() -> None:
    best = Best(TOP1)
    assert (best.state_dict(), best.row) == ({}, None)
    values = [0.2, 0.5, 0.5, 0.4, float("nan"), 0.6]
    better = [best.add(step, evaluation(value)) for step, value in enumerate(values, 1)]
    assert better == [True, True, False, False, False, True]
    assert (best.value, best.step, best.without, best.evaluated) == (0.6, 6, 0, 6)
    best.add(7, evaluation(0.1))
    best.add(8, evaluation(0.1))
    assert [best.is_enough(after) for after in (0, 2, 3)] == [False, True, False]
    again, other = Best(TOP1), Best(LOSS)
    again.load_state_dict(json.loads(json.dumps(best.state_dict())))
    assert again == best
    # By another metric nothing was found yet; and less of a loss is better.
    other.load_state_dict(best.state_dict())
    assert other == Best(LOSS)
    better = [other.add(step, evaluation(0.0, loss)) for step, loss in enumerate((0.5, 0.6, 0.2))]
    assert better == [True, False, True]


def test_of_equal_values_the_lower_loss_is_the_best_and_then_the_earlier() -> None:
    best = Best(TOP1)
    evaluations = [(0.5, 0.9), (0.5, 0.9), (0.5, 0.8), (0.4, 0.1), (0.5, 0.85), (0.5, float("nan"))]
    better = [best.add(step, evaluation(*each)) for step, each in enumerate(evaluations, 1)]
    assert better == [True, False, True, False, False, False]
    # What stops a training is the value alone.
    assert (best.step, best.loss, best.without) == (3, 0.8, 5)
    # A checkpoint from before knew no loss: the earlier one stays.
    state = best.state_dict()
    del state["loss"]
    older = Best(TOP1)
    older.load_state_dict(state)
    assert not older.add(7, evaluation(0.5, 0.0))
    assert older.add(8, evaluation(0.6, 0.7))
    assert older.loss == 0.7


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 2))


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 2))


# The weights stay as they are, so no evaluation is better than the first.
STAYS = "solver.base_lr=0.0 solver.weight_decay=0.0"
LEARNS = "solver.base_lr=0.5"
SMALL = "train.global_batch_size=8 train.micro_batch_size=4"
KEPT = "data.hold_out=0.25 checkpoint.every=1 checkpoint.keep_last=2"


def fit(folder: Path, resume: str | None = None, words: str = STAYS, **train: Any) -> Result:
    length = {"steps": 12, "eval_every": 2, "seed": 1, **train}
    recipe = recipe_in(folder, f"{SMALL} {KEPT} checkpoint.best=True {words}", train=length)
    return firecaffe.train(recipe, linear, images(40, 0), images(30, 1), resume=resume)


def test_the_best_checkpoint_stays_beside_the_newest(tmp_path: Path) -> None:
    run = tmp_path / "run"
    result, best = fit(run, steps=7), run / "checkpoints" / "best"
    steps = sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*"))
    assert steps == [2, 6, 7]
    assert load_newest(best)[0].step == 2
    assert load_newest(best.with_name("latest"))[0].step == 7
    assert result.best is not None
    assert result.best["step"] == 2
    assert Path(result.best["checkpoint"]) == best.with_name("step-00000002")
    row = record_of(run)
    assert (row["best"], row["test_of_best"]) == (result.best, None)
    assert (row["stopped_early"], row["evaluated"]) == (False, "weights")
    assert (best_step(run), best_step(tmp_path)) == (2, None)
    # The last evaluation may be the best.
    last = fit(tmp_path / "last", steps=3, eval_every=0)
    assert last.best is not None
    assert last.best["step"] == load_newest(tmp_path / "last" / "checkpoints" / "best")[0].step == 3


def test_it_stops_once_nothing_gets_better_and_counts_on(tmp_path: Path, capsys: Capture) -> None:
    whole = fit(tmp_path / "whole", stop_after=3)
    assert (whole.steps, whole.stopped_early) == (8, True)
    # Stopped in between, after two of the three.
    fit(tmp_path / "first", steps=6, stop_after=3)
    rest = fit(tmp_path / "rest", str(tmp_path / "first"), stop_after=3)
    assert (rest.steps, rest.stopped_early) == (8, True)
    assert rest.state_sha256 == whole.state_sha256
    checkpoint = tmp_path / "first" / "checkpoints" / "step-00000002"
    assert rest.best == {**(whole.best or {}), "checkpoint": str(checkpoint)}
    # At its end there is nothing left to do; with more patience there is.
    assert fit(tmp_path / "over", str(tmp_path / "rest"), stop_after=3).steps == 8
    assert fit(tmp_path / "more", str(tmp_path / "rest"), stop_after=4).steps == 10
    # No word, no stop.
    assert fit(tmp_path / "none", stop_after=0).steps == 12
    assert fit(tmp_path / "one", stop_after=1).steps == 4
    # A best checkpoint that is damaged costs the run nothing.
    state = checkpoint / "state.safetensors"
    state.write_bytes(state.read_bytes()[:-1])
    damaged = fit(tmp_path / "damaged", str(tmp_path / "first"), stop_after=3)
    assert (damaged.steps, damaged.test_of_best) == (8, None)
    assert "the best weights, of step 2, are not tested" in capsys.readouterr().out


def the_first_is_best(best: Best, step: int, evaluation: Evaluation) -> bool:
    """In place of `Best.add`."""
    best.evaluated, is_first = step, best.value is None
    best.without = 0 if is_first else best.without + 1
    if is_first:
        best.value, best.loss, best.step = 0.5, evaluation.loss, step
    return is_first


def test_after_an_early_stop_the_best_weights_are_tested_too(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    """And change no bit of what the run comes to."""
    monkeypatch.setattr(Best, "add", the_first_is_best)
    words = f"{LEARNS} train.ema_decay=0.5"
    result = fit(tmp_path / "run", None, words, stop_after=2)
    said = capsys.readouterr().out
    assert (result.steps, result.stopped_early) == (6, True)
    row = record_of(tmp_path / "run")["test_of_best"]
    assert row == result.test_of_best
    assert f"test of the best weights, of step {row['step']}: " in said
    alone = fit(tmp_path / "alone", None, words, steps=row["step"])
    assert (row["loss"], row["top1"]) == (alone.test_loss, alone.metrics["top1"])
    assert row["loss"] != result.test_loss
    last = fit(tmp_path / "without", None, f"{words} checkpoint.best=False", stop_after=2)
    assert (last.test_of_best, last.state_sha256) == (None, result.state_sha256)


def test_evaluate_says_which_weights_it_takes(tmp_path: Path, capsys: Capture) -> None:
    sizes = "train.global_batch_size=4 train.micro_batch_size=4 train.eval_batch_size=1000"
    words = "model.name=lenet data.name=generated data.hold_out=0.01 train.steps=2"
    stays = "train.eval_every=1 solver.base_lr=0.0 checkpoint.best=True"
    run = firecaffe.train(recipe_in(tmp_path / "run", f"{sizes} {words} {stays}")).folder
    for word, step, told in (([], 2, "newest; --best takes"), (["--best"], 1, "--best")):
        capsys.readouterr()
        assert main(["evaluate", str(run), *word]) == 0
        said = capsys.readouterr().out.splitlines()
        assert (f"at step {step}: " in said[-2], told in said[-1]) == (True, True)
        assert main(["evaluate", str(run), *word, "--json"]) == 0
        row = json.loads(capsys.readouterr().out)
        assert (row["best"], row["best_step"], row["step"]) == (bool(word), 1, step)


def trained(folder: Path, eval_every: int, hold_out: float, **sets: Any) -> Result:
    words = f"train.steps=5 train.eval_every={eval_every} data.hold_out={hold_out}"
    recipe = recipe_in(folder, f"{SMALL} {words}")
    return firecaffe.train(recipe, network, images(40, 0), images(30, 1), **sets)


def looked_at(folder: Path, kind: str) -> list[tuple[int, int]]:
    """The steps, and how many samples."""
    return [(row["step"], row["samples"]) for row in rows_of(folder, kind)]


def test_evaluations_on_the_way_see_held_out_images_and_change_no_bit(tmp_path: Path) -> None:
    often, never = trained(tmp_path / "often", 2, 0.25), trained(tmp_path / "never", 0, 0.25)
    assert looked_at(often.folder, "validation") == [(2, 10), (4, 10), (5, 10)]
    assert looked_at(often.folder, "test") == [(5, 30)]
    assert looked_at(never.folder, "validation") == [(5, 10)]
    assert often.weights_sha256 == never.weights_sha256
    assert often.state_sha256 == never.state_sha256
    assert often.validation is not None
    assert often.validation["top1"] == rows_of(often.folder, "validation")[-1]["top1"]
    run = read_run(often.folder)
    assert "30 training, 10 held-out and 30 test images" in run.result["data"]
    assert len(curves_of(run).metric) == 3  # a time to a target is read from these
    assert time_to(run, 1.1) is None


def test_one_s_own_validation_set(tmp_path: Path) -> None:
    run = trained(tmp_path / "own", 3, 0.0, validation_set=images(12, 2)).folder
    assert looked_at(run, "validation") == [(3, 12), (5, 12)]
    assert trained(tmp_path / "without", 0, 0.0).validation is None
    # Without validation images there is nothing to choose by.
    with pytest.raises(RecipeError, match=r"train\.eval_every is 2.*data\.hold_out") as caught:
        trained(tmp_path / "none", 2, 0.0)
    assert len(str(caught.value).splitlines()) == 1
    assert not (tmp_path / "none").exists()
