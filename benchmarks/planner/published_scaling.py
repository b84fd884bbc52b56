"""Published throughputs, forecast by `plan`'s own functions from one or two known rows.

    python -m benchmarks.planner.published_scaling > benchmarks/results/published_scaling.md

Each file of `published/families` is a cluster and trainings with rows, and so is each of
`published/unseen`, which `published_scaling_fit` does not read. Its first rows correct the
cluster by `planner.learn_rates`, as `plan --runs FILE` does; `planner.forecast` says the others.
Beside stand two null models: *linear*, the first row times the devices; and *t = a + b lg p*
through the first two rows.
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import log2
from pathlib import Path
from statistics import median

import numpy as np

from firecaffe.planner.cluster import Cluster
from firecaffe.planner.judged_rates import judged_rates
from firecaffe.planner.learn_rates import (
    RatedTraining,
    RatesFile,
    learn_rates,
    load_rates,
)
from firecaffe.planner.offers import USUAL, Usual, usual_device, usual_link

FOLDER = Path(__file__).parents[1] / "published" / "families"
UNSEEN = FOLDER.with_name("unseen")
"""Families that no fit has seen: collected afterwards, and forecast before errors were looked at.

Left out of the sources were rows whose hosts or network nobody describes, rates that are no steady
ones, and three of Azure's with a third of their neighbors' rate.
"""

LEFT_OUT = Path(__file__).parents[1] / "results" / "published_scaling.json"
"""What `benchmarks.planner.published_scaling_fit` found with each source left out."""

INFORMATIVE = 0.1
"""Error of *linear* from which on a row tells of a planner."""

Family = tuple[RatesFile, Cluster]


@dataclass(frozen=True)
class Row:
    """A row that was not known. Errors are of the throughput, as shares of the published one."""

    family: str
    training: str
    devices: int
    per_s: float
    forecast_per_s: float
    low_per_s: float
    high_per_s: float
    linear_per_s: float
    log_per_s: float | None
    """None for the second row, and where a device's batch changes."""

    @property
    def error(self) -> float:
        return self.forecast_per_s / self.per_s - 1

    @property
    def linear_error(self) -> float:
        return self.linear_per_s / self.per_s - 1

    @property
    def log_error(self) -> float | None:
        return None if self.log_per_s is None else self.log_per_s / self.per_s - 1

    @property
    def in_band(self) -> bool:
        return self.low_per_s <= self.per_s <= self.high_per_s


@cache
def families(folder: Path = FOLDER) -> list[Family]:
    return [load_rates(path) for path in sorted(folder.glob("*.toml"))]


def first_rows(training: RatedTraining, number: int) -> RatedTraining:
    """Return the training with its rows on the fewest devices known, and no other."""
    rows = sorted(training.rows, key=lambda row: row.devices)
    return replace(
        training, rows=tuple(replace(row, fit=place < number) for place, row in enumerate(rows))
    )


def judge(family: Family, known: int, usual: Usual = USUAL) -> list[Row]:
    """Forecast the rows of a family after the first `known` ones of each training."""
    rates, cluster = family
    trainings = [first_rows(training, known) for training in rates.trainings]
    return forecast_rows(rates.name, cluster, trainings, usual)


CERTAIN = dict.fromkeys(
    ("exchange_spread", "link_spread", "slowdown_spread", "jitter_spread", "scatter_spread"), 1e-6
)
"""Spreads of figures that are what is usual, whatever rows say."""

DATA_SHEET = replace(USUAL, exchange=1.0, slowdown=1e-9, jitter=1e-9)
"""A control: what data sheets say, and nothing else."""


def judge_file(family: Family, usual: Usual = USUAL) -> list[Row]:
    """Forecast a family by its cluster's file and the first row of each training as its step.

    So `plan --cluster` does with a step that was measured.
    """
    rates, cluster = family
    trainings = [first_rows(training, 1) for training in rates.trainings]
    sure = replace(cluster, links=tuple(replace(link, error=0.0) for link in cluster.links))
    learned = learn_rates(sure, trainings, replace(usual, **CERTAIN))
    device = usual_device(cluster.device, usual)
    links = tuple(usual_link(link, usual) for link in cluster.links)
    clusters = []
    for number in range(len(trainings)):
        step = learned.cluster_of(number).device.measured
        clusters.append(replace(cluster, device=replace(device, measured=step), links=links))
    return rows_on(rates.name, trainings, clusters)


def forecast_rows(
    family: str, cluster: Cluster, trainings: Sequence[RatedTraining], usual: Usual = USUAL
) -> list[Row]:
    """Forecast the rows that are not marked `fit`."""
    learned = learn_rates(cluster, trainings, usual)
    clusters = [learned.cluster_of(number) for number in range(len(trainings))]
    return rows_on(family, trainings, clusters)


def rows_on(
    family: str, trainings: Sequence[RatedTraining], clusters: Sequence[Cluster]
) -> list[Row]:
    """Forecast the rows of each training that are not marked `fit`, beside null models."""
    return [
        Row(
            family,
            rate.training.label or rate.training.model,
            rate.row.devices,
            rate.row.per_s,
            rate.per_s,
            rate.low_per_s,
            rate.high_per_s,
            rate.training.rows[0].per_s * rate.row.devices / rate.training.rows[0].devices,
            _log_per_s(rate.training, rate.row.devices),
        )
        for rate in judged_rates(trainings, clusters)
    ]


def _log_per_s(training: RatedTraining, devices: int) -> float | None:
    one, *others = training.rows
    if not others or len({training.batch_of(row) for row in training.rows}) > 1:
        return None
    two = others[0]
    if devices <= two.devices:
        return None
    slope = (training.step_s(two) - training.step_s(one)) / log2(two.devices / one.devices)
    step_s = training.step_s(one) + slope * log2(devices / one.devices)
    return devices * training.batch / step_s


@cache
def judged(known: int, folder: Path = FOLDER) -> list[Row]:
    """Forecast all families of a folder."""
    return [row for family in families(folder) for row in judge(family, known)]


def cells(errors: Iterable[float | None]) -> tuple[int, str, str]:
    """Count errors, with their median and ninth decile in per cent."""
    sizes = [abs(error) for error in errors if error is not None]
    if not sizes:
        return 0, "-", "-"
    return len(sizes), f"{100 * median(sizes):.1f}", f"{100 * np.quantile(sizes, 0.9):.1f}"


@cache
def by_file(usual: Usual) -> list[Row]:
    """Forecast all families by `judge_file`."""
    return [row for family in families() for row in judge_file(family, usual)]


def summary_table() -> list[str]:
    """Compare the forecast with the null models on the same rows."""
    lines = [
        "| known | rows | n | forecast | *linear* | *a + b lg p* | in the band |",
        "|---|---|---|---|---|---|---|",
    ]
    rows = [("a step", "all", by_file(USUAL), False)]
    for known, said in ((1, "one row"), (2, "two rows")):
        for folder, kind in ((FOLDER, ""), (UNSEEN, "unseen, ")):
            every = judged(known, folder)
            informative = [row for row in every if abs(row.linear_error) > INFORMATIVE]
            rows += [
                (said, f"{kind}all", every, False),
                (said, f"{kind}*linear* off by over {INFORMATIVE:.0%}", informative, False),
            ]
            if known > 1:
                both = [row for row in every if row.log_error is not None]
                rows.append((said, f"{kind}with *a + b lg p*", both, True))
    for said, what, some, has_log in rows:
        by_log = cells(row.log_error for row in some) if has_log else (0, "-", "-")
        columns = [cells(row.error for row in some), cells(row.linear_error for row in some)]
        shown = ["; ".join(column[1:]) for column in (*columns, by_log)]
        share = sum(row.in_band for row in some) / len(some)
        lines.append(f"| {said} | {what} | {len(some)} | {' | '.join(shown)} | {share:.0%} |")
    return [line.replace("-; -", "-") for line in lines]


def control_line() -> str:
    """What a measured step is worth beside data sheets alone."""
    by_kind = []
    for usual in (DATA_SHEET, USUAL):
        some = by_file(usual)
        _, middle, most = cells(row.error for row in some)
        held, fast = (
            f"{sum(one) / len(some):.0%}"
            for one in ([row.in_band for row in some], [row.error > 0 for row in some])
        )
        by_kind.append(f"{middle} and {most} per cent, {held} in the band, {fast} too fast")
    return (
        "*A step*: the first row is a measured step, and nothing else is corrected. The control "
        f"has data sheets alone, without what is usual: {by_kind[0]}; with it {by_kind[1]}."
    )


def left_out_table() -> list[str]:
    """Show each source forecast with the usual values of the others."""
    lines = [
        "| source left out | one row known: n, errors, in the band | two rows known |",
        "|---|---|---|",
    ]
    for entry in json.loads(LEFT_OUT.read_text("utf-8")):
        shown = [entry["source"]]
        for known in ("1", "2"):
            errors = entry[known]["errors"]
            count, middle, most = cells(errors)
            held = entry[known]["in_band"]
            shown.append(f"{count}: {middle}; {most}, {held / count:.0%}" if errors else "")
        lines.append(f"| {' | '.join(shown)} |")
    return lines


def family_lines(known: int, folder: Path) -> list[str]:
    lines = [
        f"| family | training | devices | published | forecast | band | error | *linear* | "
        f"{'*a + b lg p* |' if known > 1 else ''}",
        "|---|---|---|---|---|---|---|---|" + ("---|" if known > 1 else ""),
    ]
    for row in judged(known, folder):
        numbers = [row.per_s, row.forecast_per_s]
        errors = [row.error, row.linear_error]
        shown = ["" if error is None else f"{error:+.1%}" for error in errors]
        if known > 1:
            shown.append("" if row.log_error is None else f"{row.log_error:+.1%}")
        columns = [
            *(row.family, row.training, f"{row.devices}"),
            *(f"{number:,.4g}" for number in numbers),
            f"{row.low_per_s:,.4g} to {row.high_per_s:,.4g}{'' if row.in_band else ', missed'}",
            *shown,
        ]
        lines.append(f"| {' | '.join(columns)} |")
    return lines


HEAD = """# Published throughputs, row by row

    python -m benchmarks.planner.published_scaling > benchmarks/results/published_scaling.md

Forecast by `planner.forecast` after `planner.learn_rates`, which is what `plan --runs FILE` does,
on the files of `published/families` and, as *unseen*, on those of `published/unseen`, which no fit
has seen. Known are the first one or two rows of each training. Errors are of the throughput;
medians and ninth deciles in per cent.

Of the unseen sources, three of Azure's rows with a third of their neighbors' rate were left out.
EC2's p2.8xlarge had 25 Gbit/s in its file until its rows came, and has 10 now, from memory.
"""

FITTED = """## How the usual values were found

`planner.offers.USUAL` has ten fitted numbers. Nine are by a search over all rows of
`published/families` but those of firecaffe-titan, which was added afterwards. It seeks the highest
density of a t distribution with 4 degrees of freedom at the errors; a source weighs as the root of
its rows. The tenth is the width of bands, by their coverage. The form (exchanges that slow down
computing, a scale for each link, a scatter for each training) was chosen after seeing these errors.
With each source left out, the search is made again without it and the band left as it is. All
searches were before the errors that clusters' files say of links counted:
"""


def page() -> str:
    """Make the whole record."""
    parts = [HEAD, *summary_table(), "", control_line(), "", FITTED, *left_out_table(), ""]
    for known in (1, 2):
        head = f"{('One row', 'Two rows')[known - 1]} known"
        parts += [f"## {head}", "", *family_lines(known, FOLDER), ""]
        parts += [f"## {head}, families that no fit has seen", "", *family_lines(known, UNSEEN), ""]
    return "\n".join(parts).rstrip("\n") + "\n"


if __name__ == "__main__":
    argparse.ArgumentParser(allow_abbrev=False, description=__doc__).parse_args()
    print(page(), end="")
