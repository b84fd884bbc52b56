"""A whole search over planted trainings: what is confirmed, passed over, judged and written."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import log2
from pathlib import Path

import pytest

from firecaffe.cli.parse import read_recipe
from firecaffe.data import DataConfig
from firecaffe.errors import RunError
from firecaffe.models.config import ModelConfig
from firecaffe.recipe import Recipe, tuned_by
from firecaffe.runs.files import finite
from firecaffe.training.config import SolverConfig, TrainConfig
from firecaffe.tuning import tune as tune_module
from firecaffe.tuning.trial import Trial
from firecaffe.tuning.tune import Asked, Tuned, recipe_file, tune

RATE = 0.01
LINEAR = 4 * RATE

Judge = Callable[[Recipe], float]
"""The accuracy that a recipe comes to."""


def asked(folder: Path, **words: object) -> Asked:
    recipe = Recipe(
        model=ModelConfig("lenet"),
        data=DataConfig("generated"),
        train=TrainConfig(16, 16, steps=400),
        solver=SolverConfig(base_lr=RATE),
    )
    given = Asked(recipe, 64, ["sgd"], 6.0, 3, 0.003, [], folder, 1, 2)
    return replace(given, **words)  # type: ignore[arg-type]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tuned]:
    """A search whose trainings come to what `judge` says, at once."""

    def plant(trial: Trial, judge: Judge) -> None:
        recipe = trial.recipe
        top1 = judge(recipe) + 0.0001 * recipe.train.seed
        every, steps = recipe.train.eval_every or recipe.train.steps, recipe.train.steps
        train = {"kind": "train", "step": 1, "samples": 64, "top1": top1, "loss": 1.0}
        # As an epoch may end: with a step of one sample, and that one wrong.
        rows = [*([train] * 18), {**train, "samples": 1, "top1": 0.0}]
        rows += [
            {"kind": "validation", "step": step, "top1": top1 * step / steps, "loss": 1.0}
            for step in [*range(every, steps, every), steps]
        ]
        trial.folder.mkdir(parents=True)
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (trial.folder / "metrics.jsonl").write_text(text)
        result = {
            "world_size": 1,
            "exchange": "tree",
            "route": "tree",
            "data": "generated",
            "steps": steps,
            "images_per_s": 1.0,
            "exposed_communication": 0.0,
            "top1": top1,
            "weights_sha256": f"{hash(trial.text):x}",
        }
        (trial.folder / "result.json").write_text(json.dumps(result))
        (trial.folder / "environment.json").write_text("{}")
        (trial.folder / "recipe.toml").write_text(trial.text)
        trial.recipe_path.write_text(trial.text)

    def go(judge: Judge, **words: object) -> Tuned:
        def run_trials(trials: Sequence[Trial], **_: object) -> None:
            for trial in trials:
                if not trial.is_there:
                    plant(trial, judge)
                trial.look()

        monkeypatch.setattr(tune_module, "run_trials", run_trials)
        return tune(asked(tmp_path / "search", **words), lambda _: None)

    return go


def rising(recipe: Recipe) -> float:
    """Best at the linear rule's rate, a point worse with each half of it, and steeply beyond."""
    if recipe.train.global_batch_size == 16:
        return 0.9
    octaves = log2(recipe.solver.base_lr / LINEAR)
    return 0.9 - (0.1 * octaves if octaves > 0 else -0.01 * octaves)


def test_the_best_is_confirmed_and_written(run: Callable[..., Tuned], tmp_path: Path) -> None:
    tuned = run(rising)
    assert tuned.verdict.is_kept
    assert tuned.passed_over == []
    assert tuned.best.candidate.base_lr == pytest.approx(LINEAR, rel=0.1)
    assert tuned.best.candidate.warmup_share == 0.15
    assert (tuned.verdict.before.n, tuned.verdict.after.n) == (3, 3)
    seeds = {int(path.name.split("-")[-1]) for path in (tmp_path / "search").glob("cand*-seed-?")}
    judged = {int(path.name.split("-")[-1]) for path in (*tuned.before, *tuned.after)}
    assert (seeds, judged) == ({1}, {2, 3, 4})  # none that took part in the choice
    path = tmp_path / "found.toml"
    path.write_text(recipe_file(tuned))
    recipe = read_recipe(path)
    assert recipe == tuned.recipe
    assert "candidates at batch 64" in tuned_by(recipe)
    other = replace(recipe, solver=replace(recipe.solver, base_lr=0.123))
    assert tuned_by(other) == ""
    assert tuned_by(replace(recipe, train=replace(recipe.train, steps=99))) == ""
    assert tuned_by(replace(recipe, train=replace(recipe.train, seed=99))) == tuned_by(recipe)
    assert (recipe.train.global_batch_size, recipe.train.steps) == (64, 100)
    assert recipe.solver.warmup_steps == 15
    assert json.loads((tmp_path / "search" / "tune.json").read_text()) == json.loads(
        json.dumps(finite(tuned.as_dict()))
    )


def test_one_that_does_not_learn_under_a_new_seed_is_passed_over(
    run: Callable[..., Tuned],
) -> None:
    def at_the_edge(recipe: Recipe) -> float:
        is_edge = recipe.solver.base_lr > 0.9 * LINEAR and not recipe.data.hold_out
        return 0.1 if is_edge and recipe.train.seed == 3 else rising(recipe)

    tuned = run(at_the_edge)
    assert {each.candidate.base_lr > 0.9 * LINEAR for each in tuned.passed_over} == {True}
    assert tuned.best.candidate.base_lr < 0.9 * LINEAR
    assert tuned.verdict.after.value > 0.88


def test_what_is_lost_is_said(run: Callable[..., Tuned]) -> None:
    tuned = run(lambda recipe: rising(recipe) - 0.02 * (recipe.train.global_batch_size > 16))
    assert not tuned.verdict.is_kept
    assert "lost: " in tuned.recipe.run.tuned
    assert "-2.00 points" in tuned.recipe.run.tuned


def test_a_larger_budget_goes_on_and_never_judges_another_candidates_runs(
    run: Callable[..., Tuned],
) -> None:
    """With a budget of 1 only the first round is known, at its best the linear rule; what comes
    later is better here."""

    def falling(recipe: Recipe) -> float:
        return 0.9 - 0.02 * recipe.solver.base_lr / LINEAR

    first = run(falling, budget=1.0)
    more = run(falling, budget=6.0)
    assert more.best.candidate.base_lr < first.best.candidate.base_lr
    assert set(more.after).isdisjoint(first.after)
    assert more.before == first.before
    assert more.verdict.after.value > first.verdict.after.value


def test_another_search_in_the_same_folder_is_refused(run: Callable[..., Tuned]) -> None:
    run(rising)
    with pytest.raises(RunError, match="a search with another global_batch_size, side_by_side"):
        run(rising, global_batch_size=128, at_once=3)
