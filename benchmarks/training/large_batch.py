"""Larger batches by the rules, and by `firecaffe tune`: the trainings, and their records.

    firecaffe tune benchmarks/recipes/lenet_fashion_b32.toml --global-batch-size 256
    …
    python -m benchmarks.training.large_batch --out FOLDER --tuned SEARCH… > RECORDS.json
    python -m benchmarks.training.large_batch_page RECORDS.json > PAGE.md

Trains LeNet on Fashion-MNIST at a batch of 128, then at larger ones with each rule of the learning
rate, from two rates of the small one, each under several seeds: ordinary runs below FOLDER, one
worker each, as many side by side as there are cores. Runs that are there are not trained again.
Searches are read from their folders. The page's verdicts are made from the records alone, so they
can be made again.
"""

import argparse
import json
import os
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from firecaffe.api.recipe_argument import recipe_of
from firecaffe.recipe.sections import Recipe
from firecaffe.runs.environment import commit, cpu_name
from firecaffe.runs.run_folder import read_run_file
from firecaffe.runs.run_table import TableRun, differing_words, read_run
from firecaffe.runs.seed_groups import differing_conditions
from firecaffe.training.trial import Trial, command_lock, run_trials
from firecaffe.tuning.candidates import with_batch

RECIPE = Path(__file__).parents[1] / "recipes" / "lenet_fashion_b128.toml"
SAMPLES = 60_000
BATCHES = (512, 1024, 4096)
RATES = (0.01, 0.02)
"""Of the small batch: Caffe's for its batch of 64, and that scaled to 128. From a low one there is
little for a rule to keep.
"""

RULES = ("unscaled", "square root", "linear", "linear, warm-up", "LARS, warm-up")
WARMUP = 0.15
"""Of the training."""

LARS_RATE = 8.0

FAILED = 0.2
"""Top-1 below which a training has learned next to nothing: ten classes."""


def recipe_at(rate: float, batch: int, rule: str, seed: int) -> Recipe:
    """The recipe of a row. rate: that of the small batch."""
    recipe: Recipe = recipe_of(RECIPE)
    recipe = replace(recipe, solver=replace(recipe.solver, base_lr=rate))
    before = recipe.train.global_batch_size
    recipe = with_batch(recipe, batch, SAMPLES)
    solver = recipe.solver
    steps = recipe.train.num_steps(-(-SAMPLES // batch))
    if rule.startswith(("square root", "linear")):
        scale = "linear" if rule.startswith("linear") else "sqrt"
        solver = replace(solver, scale=scale, reference_batch_size=before)
    if rule.startswith("LARS"):
        solver = replace(solver, type="lars", base_lr=LARS_RATE, momentum_form="torch")
    if rule.endswith("warm-up"):
        solver = replace(solver, warmup_steps=max(1, round(WARMUP * steps)))
    return replace(recipe, solver=solver, train=replace(recipe.train, seed=seed))


def trials(folder: Path, rate: float, seeds: int) -> dict[tuple[int, str], list[Trial]]:
    """Those of each row of a table, the small batch first."""
    rows = [(128, "as it is"), *((batch, rule) for batch in BATCHES for rule in RULES)]
    return {
        (batch, rule): [
            Trial(
                f"b{batch}-{_dashed(rule)}-seed-{seed}", recipe_at(rate, batch, rule, seed), folder
            )
            for seed in range(1, seeds + 1)
        ]
        for batch, rule in rows
    }


def _dashed(rule: str) -> str:
    return rule.replace(", ", "-").replace(" ", "-").lower()


def rule_rows(rate: float, of_rows: dict[tuple[int, str], list[Trial]]) -> list[dict[str, Any]]:
    """The records of a table's rows, the small batch first."""
    found = []
    for (batch, rule), several in of_rows.items():
        runs = [read_run(trial.folder) for trial in several]
        top1 = top1_of(runs)
        found.append(
            {
                "rate": rate,
                "batch": batch,
                "rule": rule,
                "initial_lr": runs[0].result["initial_lr"],
                "steps": runs[0].result["steps"],
                "failed": sum(value < FAILED for value in top1["values"]),
                "top1": top1,
            }
        )
    return found


def top1_of(runs: Sequence[TableRun]) -> dict[str, Any]:
    """Of every seed. Raises: SystemExit if code or hardware differ between the runs."""
    unlike = differing_conditions(runs)
    if unlike:
        raise SystemExit(f"{runs[0].folder} and others differ in {', '.join(unlike)}")
    return {"values": [run.result["top1"] for run in runs]}


def search_record(folder: Path) -> dict[str, Any]:
    """What a search asked, tried and found."""
    found = json.loads((folder / "tune.json").read_text())
    words = tomllib.loads(json.loads((folder / "search.json").read_text())["recipe"])
    sides = {
        side: top1_of([read_run(folder / Path(run).name) for run in found[side]])
        for side in ("before", "after")
    }
    return {
        "name": folder.name.removeprefix("tune-"),
        "network": words["model"]["name"],
        "data": "CIFAR-10" if words["data"]["name"] == "packed" else "Fashion-MNIST",
        "batch_before": words["train"]["global_batch_size"],
        "batch": found["recipe"]["train"]["global_batch_size"],
        "best": found["best"]["candidate"],
        **sides,
        "searched": [
            {
                **each["candidate"],
                "steps": each["steps"],
                "top1": each["value"],
                "state": each["state"],
            }
            | {"again": each["again"]}
            for each in found["searched"]
        ],
    }


def control_record(search: Path, folders: Sequence[Path]) -> dict[str, Any]:
    """A search's result beside its recipe with another rate, under the baseline's seeds."""
    found = read_run_file(search, "tune.json")
    before, after = (
        [read_run(search / Path(folder).name) for folder in found[side]]
        for side in ("before", "after")
    )
    runs = [read_run(folder) for folder in folders]
    differ = set(differing_words([*before, *runs])) - {"environment.commit"}
    seeds = [sorted(run.words["train.seed"] for run in each) for each in (before, runs)]
    rates = {run.words["solver.base_lr"] for run in runs}
    if differ != {"solver.base_lr", "train.seed"} or seeds[0] != seeds[1] or len(rates) > 1:
        raise SystemExit(f"{search}: no control: differs in {sorted(differ)}, seeds {seeds}")
    return {
        "name": search.name.removeprefix("tune-"),
        "rate": rates.pop(),
        "rate_before": before[0].words["solver.base_lr"],
        "before": top1_of(runs),
        "after": top1_of(after),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--out", type=Path, help="where the rules are trained; else they are not")
    parser.add_argument("--tuned", type=Path, nargs="+", required=True, help="searches' folders")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--control",
        type=Path,
        nargs="+",
        action="append",
        default=[],
        metavar="SEARCH RUN…",
        help="runs of a search's recipe with another rate at its own batch size",
    )
    options = parser.parse_args()
    cores = os.cpu_count() or 1
    records: dict[str, Any] = {
        "conditions": {
            "cpu": cpu_name(),
            "cores": cores,
            "torch": torch.__version__,
            "commit": commit(),
        },
        "searches": [search_record(folder) for folder in options.tuned],
        "controls": [control_record(search, runs) for search, *runs in options.control],
    }
    if options.out is not None:
        records["rules"] = by_rules(options.out, options.seeds, cores)
    print(json.dumps(records, indent=1))


def by_rules(out: Path, seeds: int, cores: int) -> dict[str, Any]:
    """The rules' part of the records, after their trainings."""
    rows: list[dict[str, Any]] = []
    epochs = 0
    for rate in RATES:
        folder = out / f"rate-{rate:g}"
        of_rows = trials(folder, rate, seeds)
        with command_lock(folder) as lock:
            every = [trial for several in of_rows.values() for trial in several]
            run_trials(every, cores, 1, lock, _say)
        rows += rule_rows(rate, of_rows)
        epochs = every[0].recipe.train.epochs
    return {"epochs": epochs, "seeds": seeds, "rows": rows}


def _say(trial: Trial) -> None:
    print(trial.name, read_run(trial.folder).result["top1"], file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
