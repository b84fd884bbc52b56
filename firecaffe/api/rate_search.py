"""`firecaffe.tune`: the learning rate that keeps the accuracy at another batch size."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import RenderableType
from rich.table import Table

from firecaffe.api.answer import PLAIN, Answer, numbers_table
from firecaffe.api.argument_checks import (
    check_count,
    check_number,
    check_target,
    commas,
    path_of,
    paths_of,
    wrong,
)
from firecaffe.api.recipe_argument import recipe_of
from firecaffe.cluster.from_script import from_script
from firecaffe.data import check_data
from firecaffe.data.decode import cores
from firecaffe.files import finite, write_atomically
from firecaffe.recipe.sections import Recipe, TrainConfig
from firecaffe.resume_advice import option
from firecaffe.runs.run_folder import read_run_file
from firecaffe.runs.run_table import read_run
from firecaffe.training.given_parts import task_for
from firecaffe.training.trial import Trial
from firecaffe.tuning.accuracy_verdict import KEPT
from firecaffe.tuning.batch_search import TuneRequest, TuneResult, recipe_file
from firecaffe.tuning.batch_search import tune as search

MAX_TRAININGS = 10_000


@dataclass(frozen=True, repr=False)
class Tuned(Answer):
    """The rates that were tried at another batch size, and whether the best keeps the accuracy."""

    result: TuneResult
    """The search, with its verdict and the recipe that was found."""
    path: Path
    """The file of that recipe."""

    @property
    def is_kept(self) -> bool:
        """Whether the accuracy is shown to be kept."""
        return self.result.verdict.verdict == KEPT

    @property
    def recipe(self) -> Recipe:
        """The recipe that was found."""
        return self.result.recipe

    def to_dict(self) -> dict[str, Any]:
        """Return the search: each candidate, the runs before and after, and the verdict."""
        record: dict[str, Any] = finite(self.result.as_dict())
        return record

    def _parts(self) -> Iterator[RenderableType]:
        tuned = self.result
        yield _table(tuned)
        for candidate in tuned.passed_over:
            yield f"{candidate.folder.name}: passed over, it did not learn under every new seed"
        for name, folders in (("before", tuned.before), ("after", tuned.after)):
            yield f"{name}: {', '.join(map(str, folders))}"
        if self.is_kept:
            yield tuned.verdict.words
        yield f"recipe: {self.path}"


@from_script
def tune(
    recipe: Recipe | str | Path,
    *,
    global_batch_size: int,
    nproc_per_node: int = 1,
    budget: float = 8.0,
    seeds: int = 3,
    band: float | None = None,
    against: Sequence[str | Path] = (),
    solvers: str | Sequence[str] = "",
    side_by_side: int = 0,
    out: str | Path = "",
    write: str | Path = "",
    overwrite: bool = False,
    name: str = "",
) -> Tuned:
    """Find the learning rate with which another batch size keeps the recipe's accuracy.

    Each training is a separate process; a line on stderr reports each one as it ends. A search that
    was cut off continues with what its folder holds.

    Args:
        recipe: The training, or the path of its file.
        global_batch_size: The batch size to tune for.
        nproc_per_node: The ranks of each training.
        budget: What the search may cost, in trainings.
        seeds: How many seeds the best and the recipe as it is are trained with.
        band: Points of the task's metric that may be lost; 0.3 for a share, else 1 % of the metric.
        against: Finished runs of the recipe as it is; without them it trains such runs.
        solvers: The solvers to try; without them the recipe's own.
        side_by_side: Trainings at once; 0 takes what the cores allow.
        out: The folder of the search; without it runs/tune-….
        write: The file for the recipe that is found; without it one in the search's folder.
        overwrite: Replace the file of `write` if it exists.
        name: The recipe's name in names of folders; without it the name of its file.

    Raises: RecipeError for a wrong argument; RunError for a run of `against` or a folder;
    RankFailedError for a training that fails. A lost accuracy raises nothing: see `is_kept`.
    """
    checked = recipe_of(recipe)
    check_count("global_batch_size", global_batch_size, 1)
    check_count("seeds", seeds, 1)
    check_count("nproc_per_node", nproc_per_node, 1)
    check_count("side_by_side", side_by_side, 0)
    if seeds > MAX_TRAININGS:
        raise wrong("seeds", seeds, f"at most {MAX_TRAININGS:,}")
    check_number("budget", budget)
    if not 0 < budget <= MAX_TRAININGS:
        raise wrong("budget", f"{budget:g}", f"more than 0 and at most {MAX_TRAININGS:,}")
    own = "recipe" if isinstance(recipe, Recipe) else Path(recipe).stem
    stem = f"{name or own}_b{global_batch_size}"
    folder = path_of("out", out or f"runs/tune-{stem}")
    path = path_of("write", write) if write else folder / f"{stem}.toml"
    check_target(option("write"), str(write), overwrite)
    kinds = commas("solvers", solvers) or checked.solver.type
    asked = TuneRequest(
        recipe=checked,
        global_batch_size=global_batch_size,
        solvers=list(dict.fromkeys(kinds.split(","))),
        budget=budget,
        seeds=seeds,
        band=_band(band, checked),
        against=[read_run(run) for run in paths_of("against", against)],
        folder=folder,
        workers=nproc_per_node,
        at_once=side_by_side or _at_once(checked.train, nproc_per_node),
    )
    tuned = search(asked, lambda trial: _say(_line(trial)), lambda cost: _say(cost.words))
    write_atomically(path, recipe_file(tuned))
    return Tuned(tuned, path)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _band(band: float | None, recipe: Recipe) -> float | None:
    """Return --band in the units of records: for shares, a fraction of 1."""
    if band is None:
        return None
    check_number("band", band)
    if band < 0:
        raise wrong("band", f"{band:g}", "at least 0")
    data = check_data(recipe.data)
    measure = task_for(recipe, None, None, data.train).measure
    if measure.is_share and band > 100:
        raise wrong("band", f"{band:g}", "at most 100")
    return band / measure.scale


def _at_once(train: TrainConfig, workers: int) -> int:
    if train.device != "cpu" and torch.cuda.is_available():
        return max(1, torch.cuda.device_count() // workers)
    return max(1, cores() // (workers * train.threads))


def _line(trial: Trial) -> str:
    measure = trial.measure
    solver = trial.recipe.solver
    rate = f"{solver.type}, rate {solver.base_lr:.3g}, warm-up {solver.warmup_steps} steps"
    if trial.is_test_scored and not trial.ended_early:
        result = read_run_file(trial.folder, "result.json")
        steps, value = result["steps"], measure.shown(measure.value_in(result))
        return f"{trial.name}: {rate}: test {measure.words} {value} after {steps} steps"
    last, steps = trial.scores[-1], trial.scores[-1].step
    state = "diverged" if not last.is_finite else "given up" if trial.ended_early else "done"
    value = measure.shown(last.value)
    return f"{trial.name}: {rate}: {measure.words} {value} after {steps} steps, {state}"


def _table(tuned: TuneResult) -> Table:
    texts, held_out = ("", "rule", "solver"), f"held-out\n{tuned.measure.words}"
    headers = (*texts, "rate", "warm-up", "steps", held_out, "")
    table = numbers_table(*headers, texts=texts, no_wrap=False, **PLAIN)
    for number, result in enumerate(tuned.searched, start=1):
        candidate = result.candidate
        table.add_row(
            f"{number}{' *' if result == tuned.best else ''}",
            candidate.rule,
            candidate.solver,
            f"{candidate.base_lr:.4g}",
            f"{candidate.warmup_share:.0%}",
            f"{result.steps:,}",
            ", ".join(tuned.measure.shown(value) for value in (result.value, *result.again)),
            result.state,
        )
    return table
