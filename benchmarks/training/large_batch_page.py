"""The page of larger batches, from the records of the trainings of `large_batch`.

    python -m benchmarks.training.large_batch_page benchmarks/results/large_batch.json \\
        > benchmarks/results/large_batch.md
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from math import sqrt
from pathlib import Path
from textwrap import fill
from typing import Any

from scipy.stats import t

from benchmarks.training.large_batch import FAILED, LARS_RATE, RATES
from firecaffe.api.compare_groups import verdict as compared
from firecaffe.runs.measure import TOP1, of_difference, of_mean
from firecaffe.runs.statistics import BAND, CONFIDENCE, Difference, Mean, differences, mean_of
from firecaffe.tuning.accuracy_verdict import UNDECIDED, judge

Record = Mapping[str, Any]

HEAD = """# Larger batches

{cpu}, {cores} cores, torch {torch}, commit {commit}. Means over {seeds} seeds with Student's 95 %
intervals. Differences with Welch's, which hold at 95 % for all rows of a table together
(Bonferroni). Every row's runs are of the same work, on one worker each; by the invariance, any
number of workers ends in the same bits.

This page is made from [its records](large_batch.json), by
`python -m benchmarks.training.large_batch_page benchmarks/results/large_batch.json`.
{kept}"""

BY_RULES = """
## By the rules

    python -m benchmarks.training.large_batch --out FOLDER --tuned SEARCH… > RECORDS.json

LeNet on Fashion-MNIST, {epochs} epochs, a rate that falls to 0
(`benchmarks/recipes/lenet_fashion_b128.toml`) from Caffe's 0.01 and from twice that; the warm-up
takes 15 % of the training; LARS with a trust of 0.001 and a rate of {lars:g}, which nobody tuned.
Equivalent: the whole interval lies within {band:g} points; different: it excludes zero. Failed:
seeds that ended below {failed:.0%}, twice what guessing gives. A row with failed seeds has lost
without a test, and is in no other row's correction.
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
`firecaffe pack … --raw`. Nobody has chosen a rate by hand. Kept: the whole 95 % interval of the
difference lies above -{band:g} points; lost: the whole interval lies below. The cost is the
search's, in whole trainings at the larger batch, before the seeds of each side. The length of the
warm-up, 15 %, was set after a search on the first pair had found a rate that diverged under one new
seed with 5 % (LOG.md): for that choice this pair is no independent test.

| network, data | batch | candidates | cost | found | before | after | difference | verdict |
|---|---|---|---|---|---|---|---|---|
{tuned}
"""

CONTROL = """
### The baseline with another rate: {name}

If a recipe's own rate was low, a larger batch looks better than it is. The recipe with a rate of
{rate:g} in place of {before:g}, under the same seeds: {top1}. From there the larger batch's
difference is {difference} points: **{verdict}**.
"""

SWEEP = """
### Which rates fail: {name}

FireCaffe's sweep, and what else was tried: top-1 on the held-out tenth of the training images, the
mean over the last quarter's evaluations, and under the finalists' other seed.

| rule | solver | rate | warm-up | after steps | held-out top-1 | |
|---|---|---|---|---|---|---|
{sweep}
"""


def page(records: Record) -> str:
    kept = records.get("kept", "")
    text = HEAD.format(
        **records["conditions"],
        seeds=records["rules"]["seeds"] if "rules" in records else "their",
        kept=f"{fill(kept, 100)}\n" if kept else "",
    )
    if "rules" in records:
        text += by_rules(records["rules"])
    lines = "\n".join(map(tuned_line, records["searches"]))
    text += BY_TUNE.format(tuned=lines, band=100 * BAND)
    text += "".join(map(control, records["controls"]))
    for search in records["searches"]:
        text += SWEEP.format(name=search["name"], sweep=sweep_lines(search["searched"]))
    return text


def values(top1: Record) -> list[float]:
    """Each seed's. If only mean, half interval and number were kept, as many values that have these
    three: Welch's test depends on nothing else.
    """
    if "values" in top1:
        return list(top1["values"])
    mean, half, n = top1["mean"], top1["half"], top1["n"]
    if n != 3:
        raise ValueError(f"three values stand for mean and spread, not {n}")
    spread = half * sqrt(n) / float(t.ppf((1 + CONFIDENCE) / 2, n - 1))
    return [mean - spread, mean, mean + spread]


def _points(found: Difference) -> str:
    return of_difference(found, TOP1).removesuffix(" points")


def shown(top1: Record, has_failed: bool = False) -> str:
    """With every value if seeds failed, as far as they were kept."""
    if "values" in top1:
        return of_mean(mean_of(top1["values"]), TOP1, has_failed)
    if has_failed and top1["half"]:
        return f"mean {100 * top1['mean']:.2f} % (values not kept)"
    return of_mean(Mean(top1["mean"], top1["half"], top1["n"]), TOP1)


def by_rules(rules: Record) -> str:
    of_rate = {rate: [row for row in rules["rows"] if row["rate"] == rate] for rate in RATES}
    tables = "".join(
        TABLE.format(rate=rate, lines="\n".join(rule_lines(rows))) for rate, rows in of_rate.items()
    )
    best = {
        batch: max(sum(values(row["top1"])) / len(values(row["top1"])) for row in rows)
        for batch in dict.fromkeys(row["batch"] for row in rules["rows"])
        for rows in [[row for row in rules["rows"] if row["batch"] == batch]]
    }
    small, *larger = best
    return BY_RULES.format(
        epochs=rules["epochs"],
        lars=LARS_RATE,
        band=100 * BAND,
        failed=FAILED,
        tables=tables,
        better=f"{best[small]:.2%}",
        best=", ".join(
            f"{100 * (best[batch] - best[small]):+.2f} points at {batch:,}" for batch in larger
        ),
    )


def rule_lines(rows: Sequence[Record]) -> list[str]:
    """A table's, the baseline first."""
    whole = [row for row in rows[1:] if not row["failed"]]
    found = differences(values(rows[0]["top1"]), [values(row["top1"]) for row in whole])
    against: list[Difference | None] = [None, *([None] * len(rows[1:]))]
    for row, difference in zip(whole, found, strict=True):
        against[list(rows).index(row)] = difference
    return [_rule_line(row, each) for row, each in zip(rows, against, strict=True)]


def _rule_line(row: Record, against: Difference | None) -> str:
    seeds = len(values(row["top1"]))
    verdict = f"failed: {row['failed']} of {seeds} seeds" if row["failed"] else ""
    cells = [
        f"{row['batch']:,}",
        row["rule"],
        f"{row['initial_lr']:.3g}",
        f"{row['steps']:,}",
        shown(row["top1"], bool(row["failed"])),
        str(row["failed"]),
        "" if against is None else _points(against),
        verdict if against is None else compared(against),
    ]
    return f"| {' | '.join(cells)} |"


def _results(top1: Record) -> list[dict[str, float]]:
    return [{"top1": value} for value in values(top1)]


def tuned_line(search: Record) -> str:
    """A search's row."""
    searched, best = search["searched"], search["best"]
    whole = max(each["steps"] for each in searched)
    cost = sum(each["steps"] / whole + len(each["again"]) for each in searched)
    verdict = judge(_results(search["before"]), _results(search["after"]), BAND)
    warmup = f", warm-up {best['warmup_share']:.0%}" if best["warmup_share"] else ""
    more = f", {verdict.more} more of each" if verdict.verdict == UNDECIDED else ""
    cells = [
        f"{search['network']}, {search['data']}",
        f"{search['batch_before']} to {search['batch']:,}",
        str(len(searched)),
        f"{cost:.1f}",
        f"{best['rule']}: {best['base_lr']:.3g}{warmup}",
        shown(search["before"]),
        shown(search["after"]),
        _points(verdict.against),
        f"**{verdict.verdict}**{more}",
    ]
    return f"| {' | '.join(cells)} |"


def control(record: Record) -> str:
    verdict = judge(_results(record["before"]), _results(record["after"]), BAND)
    return CONTROL.format(
        name=record["name"],
        rate=record["rate"],
        before=record["rate_before"],
        top1=shown(record["before"]),
        difference=_points(verdict.against),
        verdict=verdict.verdict
        + (f", {verdict.more} more of each" if verdict.verdict == UNDECIDED else ""),
    )


def sweep_lines(searched: Sequence[Record]) -> str:
    """A search's candidates, largest rate first."""
    lines = []
    for each in sorted(searched, key=lambda each: -each["base_lr"]):
        cells = [
            each["rule"],
            each["solver"],
            f"{each['base_lr']:.3g}",
            f"{each['warmup_share']:.0%}",
            str(each["steps"]),
            ", ".join(f"{100 * top1:.2f} %" for top1 in (each["top1"], *each["again"])),
            each["state"],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("records", type=Path)
    print(page(json.loads(parser.parse_args().records.read_text())), end="")


if __name__ == "__main__":
    main()
