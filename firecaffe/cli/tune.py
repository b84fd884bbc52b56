"""`firecaffe tune RECIPE.toml --global-batch-size N`: find the rate that keeps the accuracy."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from firecaffe.cli.arguments import Parser
from firecaffe.cli.console import check_target
from firecaffe.errors import NotEnoughError, NotKeptError, RecipeError
from firecaffe.files import finite, write_atomically
from firecaffe.recipe.config import TrainConfig
from firecaffe.recipe.sections import Recipe
from firecaffe.runs.run_folder import read_run_file

if TYPE_CHECKING:
    from firecaffe.training.trial import Trial
    from firecaffe.tuning.batch_search import TuneResult

USAGE = (
    "RECIPE.toml --global-batch-size N [--against RUN…] [--budget TRAININGS] [--seeds N] "
    "[--solvers sgd,lars] [--band POINTS] [--nproc-per-node N] [--side-by-side N] [--out FOLDER] "
    "[--write FILE [--overwrite]] [--json] [--section.word value …]"
)


def make_parser() -> Parser:
    parser = Parser(
        "tune",
        USAGE,
        "Find the learning rate with which another batch size keeps the recipe's accuracy: the "
        "rules' rates, the best with several seeds, a verdict, a recipe. "
        "Exit code 0 only if the accuracy is kept, 16 if it is lost, 17 if more seeds are needed.",
        takes_recipe=True,
        instead={
            "run.folder": "--out says where the search is",
            "run.tuned": "the search says it of what it finds",
        },
    )
    add = parser.add
    add("--global-batch-size", type=int, default=0, metavar="N", help="that is tuned for")
    add("--nproc-per-node", type=int, default=1, metavar="N", help="ranks of each training")
    add("--budget", type=float, default=8.0, metavar="TRAININGS", help="that the search may cost")
    add("--seeds", type=int, default=3, metavar="N", help="of the best, and of the recipe as it is")
    add(
        "--band",
        type=float,
        default=None,
        metavar="POINTS",
        help="of the task's metric that may be lost; 0.3 of shares, else a hundredth of it",
    )
    add(
        "--against",
        nargs="+",
        type=str,
        default=[],
        metavar="RUN",
        help="finished runs of the recipe as it is",
    )
    add(
        "--solvers",
        type=str,
        default="",
        metavar="A,B",
        help="to try, as sgd,lars; else the recipe's own",
    )
    add(
        "--side-by-side",
        type=int,
        default=0,
        metavar="N",
        help="trainings at once; 0: what the cores allow",
    )
    add("--out", type=str, default="", metavar="FOLDER", help="of the search; else runs/tune-…")
    add(
        "--write",
        type=str,
        default="",
        metavar="FILE",
        help="the recipe that is written; else in the search's folder",
    )
    parser.add_overwrite()
    add("--json", action="store_true", help="print one JSON object instead")
    return parser


MOST_TRAININGS = 10_000


def main(argv: list[str]) -> int:
    from firecaffe.cli.typed_recipe import parse_recipe
    from firecaffe.runs.run_table import read_run
    from firecaffe.tuning.accuracy_verdict import LOST, UNDECIDED
    from firecaffe.tuning.batch_search import TuneRequest, recipe_file, tune

    recipe, options = parse_recipe(make_parser(), argv)
    if not options.global_batch_size:
        raise RecipeError("--global-batch-size is missing: the batch size to tune for")
    for word, least in (("global_batch_size", 1), ("seeds", 1), ("nproc_per_node", 1)):
        _check_least(word, getattr(options, word), least)
    _check_least("side_by_side", options.side_by_side, 0)
    if options.seeds > MOST_TRAININGS:
        raise RecipeError(f"--seeds is {options.seeds}; it must be at most {MOST_TRAININGS:,}")
    if not 0 < options.budget <= MOST_TRAININGS:
        raise RecipeError(
            f"--budget is {options.budget:g}; it must be more than 0 and at most {MOST_TRAININGS:,}"
        )
    stem = f"{options.recipe.stem}_b{options.global_batch_size}"
    folder = Path(options.out or f"runs/tune-{stem}")
    path = Path(options.write) if options.write else folder / f"{stem}.toml"
    check_target("--write", options.write, options.overwrite)
    asked = TuneRequest(
        recipe=recipe,
        global_batch_size=options.global_batch_size,
        solvers=list(dict.fromkeys((options.solvers or recipe.solver.type).split(","))),
        budget=options.budget,
        seeds=options.seeds,
        band=_band(options.band, recipe),
        against=[read_run(Path(run)) for run in options.against],
        folder=folder,
        workers=options.nproc_per_node,
        at_once=options.side_by_side or _at_once(recipe.train, options.nproc_per_node),
    )

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    tuned = tune(asked, lambda trial: say(_line(trial)), lambda cost: say(cost.words))
    write_atomically(path, recipe_file(tuned))
    if options.json:
        print(json.dumps(finite(tuned.as_dict()), indent=2))
    else:
        _show(tuned, path)
    verdict = tuned.verdict
    if verdict.verdict == LOST:
        raise NotKeptError(f"{verdict.words}; the best recipe all the same is {path}")
    if verdict.verdict == UNDECIDED:
        more = f"; --seeds {options.seeds + verdict.more} goes on with it" if verdict.more else ""
        raise NotEnoughError(f"{verdict.words}; the best recipe so far is {path}{more}")
    return 0


def _band(band: float | None, recipe: Recipe) -> float | None:
    """Return --band in the units of records: for shares, a fraction of 1."""
    from firecaffe.data import check_data
    from firecaffe.training.given_task import task_for

    if band is None:
        return None
    _check_least("band", band, 0)
    data = check_data(recipe.data)
    measure = task_for(recipe, None, None, data.train).measure
    if measure.is_share and band > 100:
        raise RecipeError(f"--band is {band:g}; it must be at most 100")
    return band / measure.scale


def _check_least(word: str, value: float, least: int) -> None:
    if not least <= value < float("inf"):
        raise RecipeError(f"--{word.replace('_', '-')} is {value:g}; it must be at least {least}")


def _at_once(train: TrainConfig, workers: int) -> int:
    import torch

    from firecaffe.data.decoded import cores

    if train.device != "cpu" and torch.cuda.is_available():
        return max(1, torch.cuda.device_count() // workers)
    return max(1, cores() // (workers * train.threads))


def _line(trial: Trial) -> str:
    measure = trial.measure
    solver = trial.recipe.solver
    rate = f"{solver.type}, rate {solver.base_lr:.3g}, warm-up {solver.warmup_steps} steps"
    if trial.is_of_verdict and not trial.ended_early:
        result = read_run_file(trial.folder, "result.json")
        steps, shown = result["steps"], measure.shown(measure.value_in(result))
        return f"{trial.name}: {rate}: test {measure.words} {shown} after {steps} steps"
    last, steps = trial.told[-1], trial.told[-1].step
    state = "diverged" if not last.is_finite else "given up" if trial.ended_early else "done"
    shown = measure.shown(last.value)
    return f"{trial.name}: {rate}: {measure.words} {shown} after {steps} steps, {state}"


def _show(tuned: TuneResult, path: Path) -> None:
    from firecaffe.tuning.accuracy_verdict import KEPT

    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    words = tuned.measure.words
    for header in ("", "rule", "solver", "rate", "warm-up", "steps", f"held-out\n{words}", ""):
        table.add_column(header, justify="left" if header in ("", "rule", "solver") else "right")
    for number, tried in enumerate(tuned.searched, start=1):
        candidate = tried.candidate
        table.add_row(
            f"{number}{' *' if tried == tuned.best else ''}",
            candidate.rule,
            candidate.solver,
            f"{candidate.base_lr:.4g}",
            f"{candidate.warmup_share:.0%}",
            f"{tried.steps:,}",
            ", ".join(tuned.measure.shown(value) for value in (tried.value, *tried.again)),
            tried.state,
        )
    console = Console(file=sys.stdout, soft_wrap=True)
    console.print(table)
    for tried in tuned.passed_over:
        print(f"{tried.folder.name}: passed over, it did not learn under every new seed")
    for name, folders in (("before", tuned.before), ("after", tuned.after)):
        print(f"{name}: {', '.join(map(str, folders))}")
    if tuned.verdict.verdict == KEPT:
        print(tuned.verdict.words)
    print(f"recipe: {path}")
