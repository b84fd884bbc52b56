"""Larger batches by the rules, and by `firecaffe tune`: what each keeps of the accuracy.

    firecaffe tune benchmarks/recipes/lenet_fashion_b32.toml --global-batch-size 256
    …
    python -m benchmarks.large_batch --out FOLDER --tuned SEARCH… > PAGE

Trains LeNet on Fashion-MNIST at a batch of 128, then at larger ones with each rule of the learning
rate, from two rates of the small one, each under several seeds: ordinary runs below FOLDER, one
worker each, as many side by side as there are cores. Runs that are there are not trained again.
Searches are read from their folders.
"""

import argparse
import json
import os
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from firecaffe.cli.parse import read_recipe
from firecaffe.recipe import Recipe
from firecaffe.runs.compare import differing_words, read_run
from firecaffe.runs.environment import commit, cpu_name
from firecaffe.runs.groups import Group, GroupRow, group_rows, group_runs
from firecaffe.runs.statistics import Mean
from firecaffe.tuning.larger_batch import with_batch
from firecaffe.tuning.trial import Trial, run_trials, working_in
from firecaffe.tuning.verdict import judge

RECIPE = Path(__file__).parent / "recipes" / "lenet_fashion_b128.toml"
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

BAND = 0.003

HEAD = """# Larger batches

{cpu}, {cores} cores, torch {torch}, commit {commit}. Means over seeds with Student's 95 %
intervals, differences with Welch's. Every row's runs are of the same work, on one worker each; by
the invariance, any number of workers ends in the same bits.
"""

BY_RULES = """
## By the rules

    python -m benchmarks.large_batch --out FOLDER --tuned SEARCH…

LeNet on Fashion-MNIST, {epochs} epochs, a rate that falls to 0
(`benchmarks/recipes/lenet_fashion_b128.toml`) from Caffe's 0.01 and from twice that, {seeds} seeds;
the warm-up takes 15 % of the training; LARS with a trust of 0.001 and a rate of {lars:g}, which
nobody tuned. Verdicts at 5 % over all rows of a table (Holm). Failed: seeds that ended below
{failed:.0%}, twice what guessing gives.
{tables}
**Against the better baseline**, {better}, the best row of both tables (chosen on the test images,
which flatters it) is {best}.
"""

TABLE = """
### From a rate of {rate:g}

| batch | rule | rate | steps | top-1 | failed | from batch 128 | |
|---|---|---|---|---|---|---|---|
{lines}
"""

BY_TUNE = """
## By `firecaffe tune`

    firecaffe tune RECIPE --global-batch-size N

Recipes are in `benchmarks/recipes`; CIFAR-10 is a re-encoding of its images as JPEG, packed by
`firecaffe pack … --raw`. Nobody has chosen a rate by hand. The band is 0.3 points. The cost is the
search's, in whole trainings at the larger batch, before the seeds of each side. The length of the
warm-up, 15 %, was set after a search on the first pair had found a rate that diverged under one new
seed with 5 % (LOG.md): for that choice this pair is no independent test.

| network, data | batch | candidates | cost | found | before | after | difference | verdict |
|---|---|---|---|---|---|---|---|---|
{tuned}
"""

CONTROL = """
### The baseline with another rate: {name}

Where a recipe's own rate was low, a larger batch looks better than it is. The recipe with a rate of
{rate:g} in place of {before:g}, under the same seeds: {top1}. From there the larger batch's
difference is {difference} points: **{verdict}**.
"""

SWEEP = """
### Which rates fail: {name}

FireCaffe's sweep, and what else was tried: top-1 on the held-out tenth of the training images, the
mean over the last quarter's tests, and under the finalists' other seed.

| rule | solver | rate | warm-up | after steps | held-out top-1 | |
|---|---|---|---|---|---|---|
{sweep}
"""


def recipe_at(rate: float, batch: int, rule: str, seed: int) -> Recipe:
    """The recipe of a row. rate: that of the small batch."""
    recipe = read_recipe(RECIPE)
    recipe = replace(recipe, solver=replace(recipe.solver, base_lr=rate))
    before = recipe.train.global_batch_size
    recipe = with_batch(recipe, batch, SAMPLES)
    solver = recipe.solver
    steps = recipe.train.epochs * -(-SAMPLES // batch)
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


def table(of_rows: dict[tuple[int, str], list[Trial]]) -> tuple[str, list[tuple[int, GroupRow]]]:
    """The lines of a table, and its rows with their batch sizes."""
    groups = group_runs([read_run(t.folder) for several in of_rows.values() for t in several])
    by_first = {group.first.folder: group for group in groups}
    ordered = [by_first[several[0].folder] for several in of_rows.values()]
    found = group_rows(ordered)
    lines = [
        _line(batch, rule, group, row)
        for (batch, rule), group, row in zip(of_rows, ordered, found, strict=True)
    ]
    return "\n".join(lines), [(row.global_batch_size, row) for row in found]


def _best(rows: Sequence[tuple[int, GroupRow]], batch: int) -> GroupRow:
    return max((row for of, row in rows if of == batch), key=lambda row: row.top1.value)


def _line(batch: int, rule: str, group: Group, row: GroupRow) -> str:
    against, verdict = "", ""
    if row.against is not None:
        against, verdict = _points(asdict(row.against)), row.against.verdict
    cells = [
        f"{batch:,}",
        rule,
        f"{row.initial_lr:.3g}",
        f"{group.first.result['steps']:,}",
        percent(row.top1),
        str(sum(run.result["top1"] < FAILED for run in group.runs)),
        against,
        verdict,
    ]
    return f"| {' | '.join(cells)} |"


def percent(mean: Mean) -> str:
    return f"{100 * mean.value:.2f} ± {100 * mean.half:.2f} %"


def tuned_line(folder: Path) -> str:
    """A search's row."""
    found = json.loads((folder / "tune.json").read_text())
    words = tomllib.loads(json.loads((folder / "search.json").read_text())["recipe"])
    recipe, best, verdict = found["recipe"], found["best"]["candidate"], found["verdict"]
    whole = max(each["steps"] for each in found["searched"])
    cost = sum(each["steps"] / whole for each in found["searched"])
    cost += sum(len(each["again"]) for each in found["searched"])
    data = "CIFAR-10" if words["data"]["name"] == "packed" else "Fashion-MNIST"
    warmup = f", warm-up {best['warmup_share']:.0%}" if best["warmup_share"] else ""
    cells = [
        f"{words['model']['name']}, {data}",
        f"{words['train']['global_batch_size']} to {recipe['train']['global_batch_size']:,}",
        str(len(found["searched"])),
        f"{cost:.1f}",
        f"{best['rule']}: {best['base_lr']:.3g}{warmup}",
        percent(Mean(**verdict["before"])),
        percent(Mean(**verdict["after"])),
        _points(verdict["against"]),
        f"**{verdict['verdict']}**",
    ]
    return f"| {' | '.join(cells)} |"


def control(search: Path, folders: Sequence[Path]) -> str:
    """A search's result against its recipe with another rate, under the baseline's seeds."""
    found = json.loads((search / "tune.json").read_text())
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
    verdict = judge([run.result for run in runs], [run.result for run in after], BAND)
    return CONTROL.format(
        name=search.name.removeprefix("tune-"),
        rate=rates.pop(),
        before=before[0].words["solver.base_lr"],
        top1=percent(verdict.before),
        difference=_points(asdict(verdict.against)),
        verdict=verdict.verdict,
    )


def _points(against: dict[str, float]) -> str:
    value, low, high = (f"{100 * against[name]:+.2f}" for name in ("value", "low", "high"))
    return f"{value} ({low} to {high})"


def sweep_lines(folder: Path) -> str:
    """A search's candidates, largest rate first."""
    found: list[dict[str, Any]] = json.loads((folder / "tune.json").read_text())["searched"]
    lines = []
    for each in sorted(found, key=lambda each: -each["candidate"]["base_lr"]):
        candidate = each["candidate"]
        cells = [
            candidate["rule"],
            candidate["solver"],
            f"{candidate['base_lr']:.3g}",
            f"{candidate['warmup_share']:.0%}",
            str(each["steps"]),
            ", ".join(f"{100 * top1:.2f} %" for top1 in (each["top1"], *each["again"])),
            each["state"],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
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
    page = HEAD.format(cpu=cpu_name(), cores=cores, torch=torch.__version__, commit=commit())
    if options.out is not None:
        page += by_rules(options.out, options.seeds, cores)
    page += BY_TUNE.format(tuned="\n".join(tuned_line(folder) for folder in options.tuned))
    for search, *runs in options.control:
        page += control(search, runs)
    for folder in options.tuned:
        name = folder.name.removeprefix("tune-")
        page += SWEEP.format(name=name, sweep=sweep_lines(folder))
    print(page, end="")


def by_rules(out: Path, seeds: int, cores: int) -> str:
    """The rules' part of the page, after their trainings."""
    tables, rows = "", []
    for rate in RATES:
        folder = out / f"rate-{rate:g}"
        of_rows = trials(folder, rate, seeds)
        with working_in(folder) as lock:
            every = [trial for several in of_rows.values() for trial in several]
            run_trials(every, cores, 1, lock, _say)
        lines, found = table(of_rows)
        tables += TABLE.format(rate=rate, lines=lines)
        rows += found
    better = _best(rows, 128).top1.value
    best = [
        f"{100 * (_best(rows, batch).top1.value - better):+.2f} points at {batch:,}"
        for batch in BATCHES
    ]
    return BY_RULES.format(
        epochs=every[0].recipe.train.epochs,
        seeds=seeds,
        lars=LARS_RATE,
        failed=FAILED,
        tables=tables,
        better=f"{better:.2%}",
        best=", ".join(best),
    )


def _say(trial: Trial) -> None:
    print(trial.name, trial.told[-1].top1, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
