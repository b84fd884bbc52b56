"""Runs a whole search: candidates, the best under several seeds, the verdict, the recipe.

A search leaves these files in its folder:

search.json          the request; the same search is resumed, another one is refused
candidate-NN/        a run folder each, with NN.toml and NN.log next to it
before-seed-S/       the recipe as it was, if no finished runs of it were given
after-NN-seed-S/     the best candidate, on all of the recipe's training samples
tune.json            every candidate and the verdict; written last
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from firecaffe.data import check_data
from firecaffe.errors import RecipeError
from firecaffe.files import write_json
from firecaffe.models.weights import file_digest
from firecaffe.recipe.checked_recipe import check_recipe
from firecaffe.recipe.run import sample_order, total_steps
from firecaffe.recipe.sections import Recipe, identity, search_id, to_toml
from firecaffe.resume_advice import option
from firecaffe.runs.measure import TOP1, Measure
from firecaffe.runs.run_folder import METRICS
from firecaffe.runs.run_table import TableRun, read_run, samples_seen
from firecaffe.runs.schemas import TrainRow
from firecaffe.runs.seed_groups import differing_conditions
from firecaffe.schema import read_rows
from firecaffe.training.checks import preflight
from firecaffe.training.given_parts import task_for
from firecaffe.training.load import find_weights
from firecaffe.training.trial import Trial, TrialScore, claim_folder, command_lock, run_trials
from firecaffe.tuning.accuracy_verdict import Verdict, judge
from firecaffe.tuning.candidates import (
    FINALISTS,
    SEEDS_OF_FINALISTS,
    TESTS_OF_A_TRIAL,
    CandidateResult,
    Search,
    apply,
    over_seeds,
    ranked,
    with_batch,
)


@dataclass(frozen=True)
class TuneRequest:
    recipe: Recipe
    global_batch_size: int
    solvers: Sequence[str]
    budget: float
    """The cost allowed, in whole trainings at the new batch size."""
    seeds: int
    band: float | None
    """Loss allowed in the metric, for shares a fraction of 1; None: `runs.statistics` decides."""
    against: Sequence[TableRun]
    """Finished runs of the recipe as it is; if empty, they are trained."""
    folder: Path
    workers: int
    at_once: int


@dataclass(frozen=True)
class SearchCost:
    """The most that a search costs, in trainings; all see the same number of samples."""

    candidates: int
    """Whole trainings; those that are given up count by their part."""
    again: int
    before: int
    after: int
    if_passed_over: int
    """Additional trainings if finalists do not learn under every new seed."""
    samples: int
    samples_per_s: float | None
    at_once: int

    @property
    def trainings(self) -> int:
        return self.candidates + self.again + self.before + self.after

    @property
    def words(self) -> str:
        parts = {
            "candidates": self.candidates,
            "the best under another seed": self.again,
            "the recipe as it is": self.before,
            "the best on all training samples": self.after,
        }
        said = (
            f"at most {self.trainings} trainings of {self.samples:,} samples, "
            f"{self.trainings * self.samples:,} in all: "
            + ", ".join(f"{what} {count}" for what, count in parts.items() if count)
            + f" (and {self.if_passed_over} more if finalists fail under new seeds)"
        )
        if self.samples_per_s:
            hours = self.trainings * self.samples / self.samples_per_s / self.at_once / 3600
            said += f"; about {hours:.2g} h at the {self.samples_per_s:,.0f} samples/s of "
            said += option("against")
        return said


def cost_of(asked: TuneRequest, search: Search) -> SearchCost:
    finalists = min(FINALISTS, search.most_candidates)
    rates = [run.result["images_per_s"] for run in asked.against if run.result["images_per_s"]]
    return SearchCost(
        candidates=search.most_candidates,
        again=finalists * SEEDS_OF_FINALISTS,
        before=0 if asked.against else asked.seeds,
        after=asked.seeds,
        if_passed_over=(finalists - 1) * asked.seeds,
        samples=sample_order(search.recipe, check_data(asked.recipe.data)).samples_before(
            search.steps
        ),
        samples_per_s=fmean(rates) if rates else None,
        at_once=asked.at_once,
    )


@dataclass(frozen=True)
class TuneResult:
    searched: list[CandidateResult]
    best: CandidateResult
    passed_over: list[CandidateResult]
    """Finalists that ranked higher and did not learn under every new seed."""
    before: list[Path]
    after: list[Path]
    verdict: Verdict
    recipe: Recipe
    measure: Measure

    def as_dict(self) -> dict[str, Any]:
        content = asdict(self)
        content["recipe"] = asdict(self.recipe)
        for entry in (*content["searched"], *content["passed_over"], content["best"]):
            entry["folder"] = str(entry["folder"])
        return content | {name: list(map(str, content[name])) for name in ("before", "after")}


def plan_search(asked: TuneRequest) -> Search:
    recipe = asked.recipe
    if recipe.synchrony.is_served:
        raise RecipeError(
            f"synchrony.mode is {recipe.synchrony.mode}, whose updates are not of train."
            "global_batch_size samples, by which a search chooses rates; tune takes every_step"
        )
    data = check_data(recipe.data)
    large = with_batch(recipe, asked.global_batch_size, len(data.train))
    steps = total_steps(large, data)
    search = Search(
        large,
        recipe.train.global_batch_size,
        steps,
        asked.solvers,
        asked.budget,
        asked.at_once,
        asked.folder,
        task_for(recipe, None, None, data.train).measure,
    )
    if steps < 2 * TESTS_OF_A_TRIAL:
        raise RecipeError(
            f"{option('global_batch_size')} {asked.global_batch_size} leaves {steps} steps of "
            f"training; expected at least {2 * TESTS_OF_A_TRIAL} to judge a rate by"
        )
    candidate = search.trial_recipe(search.rules()[0])
    for tried in (large, candidate, *([] if asked.against else [recipe])):
        preflight(check_recipe(tried.replace("run.folder", "")), asked.workers)
    samples = sample_order(recipe, data).samples_before(total_steps(recipe, data))
    for run in asked.against:
        _check_against(run, recipe, data.description, samples)
    unlike = differing_conditions(asked.against)
    if unlike:
        raise RecipeError(
            f"{option('against')} has runs that differ in {', '.join(unlike)}; give runs of the "
            "same code on the same hardware"
        )
    if len({run.result["weights_sha256"] for run in asked.against}) < len(asked.against):
        raise RecipeError(
            f"{option('against')} has runs that ended in the same weights; a repetition is no "
            "other seed"
        )
    return search


FREE_WORDS = ("train.seed", "train.steps", "train.epochs")


def _check_against(run: TableRun, recipe: Recipe, data: str, samples: int) -> None:
    wanted = {"data": data, "samples seen": samples, **identity(recipe, 0)}
    if recipe.model.weights:  # compare digests, as a run may have read another folder
        wanted["model.weights"] = f"sha256 {file_digest(find_weights(recipe.model.weights)[0])}"
    facts = {"data": run.result["data"], "samples seen": samples_seen(run), **run.words}
    for name, value in wanted.items():
        if name in facts and name not in FREE_WORDS and facts[name] != value:
            raise RecipeError(
                f"{option('against')} {run.folder}: its {name} is {facts[name]}, the recipe's is "
                f"{value}; give runs of the recipe as it is"
            )


def tune(
    asked: TuneRequest, say: Callable[[Trial], None], say_cost: Callable[[SearchCost], None]
) -> TuneResult:
    """Search, confirm and judge; resume if the folder holds results of the same search.

    say: called with each training as it ends. say_cost: called with the whole cost before the
    first. Raises: RunError if the folder holds another search; errors of `run_trials`.
    """
    search = plan_search(asked)
    say_cost(cost_of(asked, search))
    with command_lock(asked.folder) as lock:
        _claim(asked)
        train = partial(
            run_trials, at_once=asked.at_once, workers=asked.workers, lock=lock, say=say
        )
        searched = search.run(train)
        measure = search.measure
        before = [] if asked.against else _over_seeds(asked, asked.recipe, "before", measure)
        finalists = ranked(searched, measure)
        for place, winner in enumerate(finalists):
            recipe = apply(search.recipe, winner.candidate, search.steps).replace("run.tuned", "")
            number = winner.folder.name.removeprefix("candidate-")
            after = _over_seeds(asked, recipe, f"after-{number}", measure, has_diverged)
            train([*([] if place else before), *after])  # all at the same time
            if all(not t.ended_early and _has_learned(t.folder, winner, measure) for t in after):
                break
        if any(trial.ended_early for trial in after):
            raise RecipeError(
                f"none of {len(finalists)} finalists came to its end under every new seed; take a "
                "smaller batch, or a longer warm-up"
            )
        earlier = asked.against or [read_run(trial.folder) for trial in before]
        verdict = judge(
            [run.result for run in earlier],
            [read_run(trial.folder).result for trial in after],
            asked.band,
        )
        unlike = differing_conditions([*earlier, *(read_run(trial.folder) for trial in after)])
        if unlike:
            said = f"{verdict.words}; the two sides differ in {', '.join(unlike)}"
            verdict = replace(verdict, words=said)
        tuned = TuneResult(
            searched=searched,
            best=winner,
            passed_over=finalists[:place],
            before=[run.folder for run in earlier],
            after=[trial.folder for trial in after],
            verdict=verdict,
            recipe=recipe,
            measure=measure,
        )
        tuned = replace(tuned, recipe=_signed(asked, tuned))
        write_json(asked.folder / "tune.json", tuned.as_dict())
        return tuned


def has_diverged(scores: Sequence[TrialScore]) -> bool:
    return not scores[-1].is_finite


def _over_seeds(
    asked: TuneRequest,
    recipe: Recipe,
    name: str,
    measure: Measure,
    end: Callable[[Sequence[TrialScore]], bool] = lambda _: False,
) -> list[Trial]:
    trial = Trial(name, recipe, asked.folder, measure, end, is_test_scored=True)
    return over_seeds(trial, SEEDS_OF_FINALISTS + 1, asked.seeds)


def _has_learned(folder: Path, winner: CandidateResult, measure: Measure) -> bool:
    """Whether a training learned at least half as well as its candidate; uses no test sample."""
    rows = _train_rows(folder)
    if measure != TOP1:
        return _loss_drop(rows) >= _loss_drop(_train_rows(winner.folder)) / 2
    late = rows[len(rows) * 9 // 10 :]  # the last step may have a single sample
    correct = sum(row["top1"] * row["samples"] for row in late)
    return bool(correct >= winner.mean_value / 2 * sum(row["samples"] for row in late))


def _train_rows(folder: Path) -> list[dict[str, Any]]:
    return [{**row} for row in read_rows(folder / METRICS, TrainRow, holding=b'"train"')]


def _loss_drop(rows: Sequence[dict[str, Any]]) -> float:
    tenth = max(1, len(rows) // 10)
    losses = [row["loss"] for row in (*rows[:tenth], *rows[-tenth:])]
    if None in losses:
        return float("-inf")
    return fmean(losses[:tenth]) - fmean(losses[-tenth:])


def _signed(asked: TuneRequest, tuned: TuneResult) -> Recipe:
    said = (
        f"best of {len(tuned.searched)} candidates at batch {asked.global_batch_size} "
        f"({tuned.best.candidate.rule}); {tuned.verdict.words}; {asked.folder}; "
        f"recipe {search_id(tuned.recipe)}"
    )
    run = replace(asked.recipe.run, tuned=said, folder="")
    return replace(tuned.recipe, run=run)


def recipe_file(tuned: TuneResult) -> str:
    candidate = tuned.best.candidate
    heading = (
        f"# Found by firecaffe tune: solver {candidate.solver}, rate {candidate.base_lr:g} "
        f"({candidate.rule}), warm-up over {candidate.warmup_share:.0%} of the training."
    )
    return f"{heading}\n# Accuracy {tuned.verdict.words}.\n\n{to_toml(tuned.recipe)}"


def _claim(asked: TuneRequest) -> None:
    wanted: dict[str, Any] = {
        "recipe": to_toml(asked.recipe.replace("run.folder", "")),
        "global_batch_size": asked.global_batch_size,
        "solvers": list(asked.solvers),
        "side_by_side": asked.at_once,
    }
    claim_folder(asked.folder / "search.json", wanted, "a search with another {}", "folder")
