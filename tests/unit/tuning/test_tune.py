"""A whole search over planted trainings: what is confirmed, judged and written."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isnan, log2, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from firecaffe.api.recipe_argument import recipe_of
from firecaffe.data import DataConfig
from firecaffe.errors import RecipeError, RunError
from firecaffe.files import finite
from firecaffe.models import ModelConfig
from firecaffe.models.network import make_network
from firecaffe.models.weights import file_digest
from firecaffe.recipe.sections import Recipe, TrainConfig, tuned_by
from firecaffe.runs.run_table import TableRun, read_run
from firecaffe.solvers.config import SolverConfig
from firecaffe.training.trial import Trial
from firecaffe.tuning import batch_search
from firecaffe.tuning.accuracy_verdict import KEPT, LOST, UNDECIDED
from firecaffe.tuning.accuracy_verdict import judge as verdict_of
from firecaffe.tuning.batch_search import (
    SearchCost,
    TuneRequest,
    TuneResult,
    cost_of,
    plan_search,
    recipe_file,
    tune,
)
from tests.few_images import TEST_IMAGES
from tests.kit.compared_runs import plant

RATE = 0.01
LINEAR = 4 * RATE

Judge = Callable[[Recipe], float]
"""The accuracy that a recipe comes to."""


def asked(folder: Path, **words: object) -> TuneRequest:
    recipe = Recipe(
        model=ModelConfig("lenet"),
        data=DataConfig("generated"),
        train=TrainConfig(16, 16, steps=400),
        solver=SolverConfig(base_lr=RATE),
    )
    given = TuneRequest(recipe, 64, ["sgd"], 6.0, 3, 0.003, [], folder, 1, 2)
    return replace(given, **words)  # type: ignore[arg-type]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., TuneResult]:
    """A search whose trainings come to what `judge` says, at once."""

    def record(trial: Trial, judge: Judge) -> None:
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
        if isnan(top1):
            rows = [{"kind": "validation", "step": 1, "top1": 0.1, "loss": None}]
        data = f"generated: 10000 training and {TEST_IMAGES} test images, 10 classes, 1 x 28 x 28"
        words = {"result__steps": steps, "result__data": data, "result__top1": top1}
        plant(trial.folder, **words, result__weights_sha256=f"{hash(trial.text):x}")
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (trial.folder / "metrics.jsonl").write_text(text)
        if isnan(top1):
            (trial.folder / "result.json").unlink()
        (trial.folder / "recipe.toml").write_text(trial.text)
        trial.recipe_path.write_text(trial.text)

    def go(judge: Judge, **words: object) -> TuneResult:
        def run_trials(trials: Sequence[Trial], **_: object) -> None:
            for trial in trials:
                if not trial.is_there:
                    record(trial, judge)
                trial.look()

        monkeypatch.setattr(batch_search, "run_trials", run_trials)
        given = asked(tmp_path / "search", **words)
        return tune(given, lambda _: None, lambda _: None)

    return go


def rising(recipe: Recipe) -> float:
    """Best at the linear rule's rate, a point worse with each half of it, and steeply beyond."""
    if recipe.train.global_batch_size == 16:
        return 0.9
    octaves = log2(recipe.solver.base_lr / LINEAR)
    return 0.9 - (0.1 * octaves if octaves > 0 else -0.01 * octaves)


def test_the_best_is_confirmed_and_written(run: Callable[..., TuneResult], tmp_path: Path) -> None:
    tuned = run(rising)
    assert tuned.verdict.verdict == KEPT
    assert tuned.passed_over == []
    assert tuned.best.candidate.base_lr == pytest.approx(LINEAR, rel=0.1)
    assert tuned.best.candidate.warmup_share == 0.15
    assert (tuned.verdict.before.n, tuned.verdict.after.n) == (3, 3)
    given = asked(tmp_path / "search")
    cost = cost_of(given, plan_search(given))  # no more than is said before it begins
    assert sum(each.steps for each in tuned.searched) <= cost.candidates * 100
    assert sum(len(each.again) for each in tuned.searched) == cost.again
    assert (len(tuned.before), len(tuned.after)) == (cost.before, cost.after)
    seeds = {int(path.name.split("-")[-1]) for path in (tmp_path / "search").glob("cand*-seed-?")}
    judged = {int(path.name.split("-")[-1]) for path in (*tuned.before, *tuned.after)}
    assert (seeds, judged) == ({1}, {2, 3, 4})  # none that took part in the choice
    path = tmp_path / "found.toml"
    path.write_text(recipe_file(tuned))
    recipe = recipe_of(path)
    assert recipe == tuned.recipe
    assert "candidates at batch 64" in tuned_by(recipe)
    for word, value in (("solver.base_lr", 0.123), ("train.steps", 99)):
        assert tuned_by(recipe.replace(word, value)) == ""
    assert tuned_by(recipe.replace("train.seed", 99)) == tuned_by(recipe)
    assert (recipe.train.global_batch_size, recipe.train.steps) == (64, 100)
    assert recipe.solver.warmup_steps == 15
    written = json.loads((tmp_path / "search" / "tune.json").read_text())
    assert written == json.loads(json.dumps(finite(tuned.as_dict())))
    with pytest.raises(RunError, match="a search with another global_batch_size, side_by_side"):
        run(rising, global_batch_size=128, at_once=3)
    (tmp_path / "search" / "search.json").unlink()  # somebody's folder
    with pytest.raises(RunError, match="holds other files; give "):
        run(rising)


def test_a_recipe_that_holds_samples_out_keeps_them_on_both_sides(
    run: Callable[..., TuneResult], tmp_path: Path
) -> None:
    recipe = asked(tmp_path / "search").recipe
    tuned = run(rising, budget=1.0, recipe=recipe.replace("data.hold_out", 0.2))
    assert tuned.recipe.data.hold_out == 0.2
    folders = [*tuned.before, *tuned.after, tuned.best.folder]
    kept = [recipe_of(folder / "recipe.toml").data.hold_out for folder in folders]
    assert kept == [0.2] * 7
    assert tuned.verdict.verdict == KEPT


@pytest.mark.parametrize("comes_to", [0.1, nan])
def test_one_that_does_not_learn_under_a_new_seed_is_passed_over(
    run: Callable[..., TuneResult], comes_to: float
) -> None:
    """Nor one whose loss is no number there, which ends a training."""

    def at_the_edge(recipe: Recipe) -> float:
        is_edge = recipe.solver.base_lr > 0.9 * LINEAR and not recipe.data.hold_out
        return comes_to if is_edge and recipe.train.seed == 3 else rising(recipe)

    tuned = run(at_the_edge)
    assert {each.candidate.base_lr > 0.9 * LINEAR for each in tuned.passed_over} == {True}
    assert tuned.best.candidate.base_lr < 0.9 * LINEAR
    assert tuned.verdict.after.value > 0.88


def test_what_is_lost_is_said(run: Callable[..., TuneResult]) -> None:
    tuned = run(lambda recipe: rising(recipe) - 0.02 * (recipe.train.global_batch_size > 16))
    assert tuned.verdict.verdict == LOST
    assert "lost: " in tuned.recipe.run.tuned
    assert "-2.00 (-2.0" in tuned.recipe.run.tuned


def test_a_larger_budget_goes_on_and_never_judges_another_candidates_runs(
    run: Callable[..., TuneResult],
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


def test_the_whole_cost_is_said_before_the_first_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what comes behind the candidates: finalists, and both sides of the verdict."""
    said: list[SearchCost] = []

    def refuse(*_: object, **__: object) -> None:
        raise RunError("nothing is to be trained yet")

    monkeypatch.setattr(batch_search, "run_trials", refuse)
    with pytest.raises(RunError, match="nothing is to be trained yet"):
        tune(asked(tmp_path / "search", at_once=1), lambda _: None, said.append)
    (cost,) = said
    # A budget of 6, three finalists under one seed more, three seeds of each side.
    assert (cost.candidates, cost.again, cost.before, cost.after) == (6, 3, 3, 3)
    assert cost.if_passed_over == 6
    assert (cost.trainings, cost.samples) == (15, 6400)
    assert "at most 15 trainings of 6,400 samples, 96,000 in all" in cost.words
    assert "h at" not in cost.words
    timed = replace(cost, samples_per_s=80.0, at_once=2)
    assert "about 0.17 h at the 80 samples/s" in timed.words


def test_baselines_have_the_first_weights_of_the_recipe(
    run: Callable[..., TuneResult], tmp_path: Path
) -> None:
    folders = run(rising, budget=1.0).before
    recipe = asked(tmp_path / "search").recipe
    file = str(tmp_path / "first.pt")
    torch.save(make_network(recipe.model, 10, 1).state_dict(), file)
    recipe = recipe.replace("model.weights", file)

    def against(sha256: str) -> list[TableRun]:
        for folder in folders:
            result = json.loads((folder / "result.json").read_text())
            text = json.dumps(result | {"first_weights": {"sha256": sha256}})
            (folder / "result.json").write_text(text)
        return [read_run(folder) for folder in folders]

    plan_search(asked(tmp_path / "search", recipe=recipe, against=against(file_digest(file))))
    given = asked(tmp_path / "search", recipe=recipe, against=against("b0b"))
    with pytest.raises(RecipeError, match=r"its model\.weights is sha256 b0b, the recipe's is sha"):
        plan_search(given)


def test_baselines_of_other_code_are_no_baseline(
    run: Callable[..., TuneResult], tmp_path: Path
) -> None:
    """Two sources among the runs are refused; one that is not this one's is said."""
    folders = run(rising, budget=1.0).before
    files = [folder / "environment.json" for folder in folders]
    facts = json.dumps(json.loads(files[0].read_text()) | {"source": "b0b"})
    files[0].write_text(facts)
    given = asked(tmp_path / "search", against=[read_run(folder) for folder in folders])
    with pytest.raises(RecipeError, match="against has runs that differ in the code"):
        plan_search(given)
    for file in files:
        file.write_text(facts)
    again = run(rising, budget=1.0, against=[read_run(folder) for folder in folders])
    assert "the two sides differ in the code" in again.verdict.words


BEFORE = [0.900, 0.901, 0.902]
BAND = 0.003


def results(top1s: list[float]) -> list[dict[str, Any]]:
    words = {"largest_class_share": 0.1, "test_samples": 10_000}
    return [{"top1": top1, **words} for top1 in top1s]


@pytest.mark.parametrize(
    ("after", "verdict", "words"),
    [
        (BEFORE, KEPT, "+0.00 (-0.23 to +0.23) points; up to 0.3 may be lost"),
        ([0.910, 0.911, 0.912], KEPT, "+1.00"),
        ([0.880, 0.881, 0.882], LOST, "88.10 ± 0.25 % (n = 3) against 90.10"),
        ([0.899, 0.900, 0.898], UNDECIDED, "-0.20 ("),  # its mean alone would be within the band
        ([0.890, 0.898, 0.903], UNDECIDED, "more of each would do"),
        ([0.9], UNDECIDED, "of each would do: 90.00 % (n = 1)"),
        ([0.92, 0.85, 0.35], UNDECIDED, "median 85.00 % (35.00, 85.00, 92.00)"),  # 70.67 ± 76.9
        ([0.899, 0.1004, 0.902], LOST, "1 of 3 runs did not learn"),
    ],
)
def test_verdicts(after: list[float], verdict: str, words: str) -> None:
    found = verdict_of(results(BEFORE), results(after), BAND)
    assert found.verdict == verdict
    assert found.words.startswith(verdict)
    assert words in found.words
    assert bool(found.more) == (verdict == UNDECIDED)


def test_a_baseline_that_failed_has_nothing_to_keep() -> None:
    found = verdict_of(results([0.1, 0.9, 0.9]), results(BEFORE), BAND)
    assert (found.verdict, found.more) == (UNDECIDED, None)
    assert "the recipe as it is: 1 of 3 runs did not learn" in found.words


def test_a_loss_of_exactly_the_band_is_kept() -> None:
    """30 of 10,000 images, however the floats fall."""
    for correct in range(9000, 9010):
        before = results([correct / 10_000] * 3)
        for lost, verdict in ((30, KEPT), (31, LOST)):
            after = results([(correct - lost) / 10_000] * 3)
            assert verdict_of(before, after, BAND).verdict == verdict


def test_the_band_is_the_users() -> None:
    for band, verdict in ((0.01, KEPT), (0.006, UNDECIDED), (0.002, LOST)):
        assert verdict_of(results(BEFORE), results([0.893, 0.894, 0.895]), band).verdict == verdict


def test_a_loss_of_the_band_is_seldom_called_kept() -> None:
    """Nor lost: each of them in 2.5 % of such searches at most, with room for 60 of them."""
    drawn = np.random.default_rng(0).normal(0.9, 0.002, (60, 2, 5))
    verdicts = [
        verdict_of(results(before.tolist()), results((after - BAND).tolist()), BAND).verdict
        for before, after in drawn
    ]
    assert verdicts.count(KEPT) <= 5
    assert verdicts.count(LOST) <= 5


@pytest.mark.parametrize(
    ("after", "verdict"), [([2.0, 2.01, 2.02], KEPT), ([3.0, 3.01, 3.02], LOST)]
)
def test_of_an_error_less_is_kept(after: list[float], verdict: str) -> None:
    words = {"metric": "mae", "higher_is_better": False, "shares": []}
    before = [{"mae": value, **words} for value in (2.5, 2.51, 2.52)]
    found = verdict_of(before, [{"mae": value, **words} for value in after], None)
    assert found.verdict == verdict
    assert found.band == pytest.approx(0.0251)
    assert f"{after[1] - 2.51:+.4g}" in found.words
    assert "%" not in found.words
