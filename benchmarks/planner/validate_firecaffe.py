"""FireCaffe's own runs, by `plan --runs` and by the formula of its paper.

`plan` knows the rates of one worker, the paper's own baselines; then also the marked row. The
formula is the null model that knows most: steps of (b / p) images at one worker's rate, and after
them a tree of whole vectors, 2 lg p of them one after the other, nothing overlapped. One bandwidth
is fitted to the marked row.

Source: Iandola et al. 2016 (arXiv 1511.00175), its tables of NiN and GoogLeNet.
"""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from benchmarks.kit.paragraph import paragraph
from benchmarks.planner.published_scaling import families, forecast_rows
from firecaffe.models import ModelConfig
from firecaffe.planner.cluster import load_cluster
from firecaffe.planner.price import rounds_only_s
from firecaffe.planner.simulate import Network
from firecaffe.planner.workload import IMAGENET_IMAGES, layers_of


@dataclass(frozen=True)
class Run:
    """One row of the paper, beside its training on one worker."""

    net: str
    workers: int
    batch: int
    epochs: int
    hours: float
    alone_hours: float
    alone_epochs: int
    fitted: bool = False
    implied: bool = False

    @property
    def steps(self) -> float:
        return self.epochs * IMAGENET_IMAGES / self.batch

    @property
    def compute_s(self) -> float:
        alone_s = self.alone_hours * 3600 / (self.alone_epochs * IMAGENET_IMAGES)
        return self.batch / self.workers * alone_s

    @property
    def linear_hours(self) -> float:
        """The null model: the images of one worker, times workers."""
        return self.steps * self.compute_s / 3600


def read_runs(path: Path) -> list[Run]:
    runs = []
    for table in tomllib.loads(path.read_text("utf-8"))["run"]:
        alone = table["alone"]
        first = {"alone_hours": alone["hours"], "alone_epochs": alone["epochs"]}
        runs += [Run(net=table["net"], **first, **row) for row in table["rows"]]
    return runs


@cache
def weights(net: str) -> int:
    return layers_of(ModelConfig(net), None, None).profile.parameters


def network(workers: int, bandwidth_bytes_per_s: float) -> Network:
    (link,) = load_cluster("titan").links
    fitted = replace(link, latency_s=0.0, bandwidth_bytes_per_s=bandwidth_bytes_per_s)
    return Network((fitted,), workers)


def fitted_bandwidth(runs: Sequence[Run]) -> float:
    """Bytes a second that make the marked run's time."""
    (run,) = (run for run in runs if run.fitted)
    exchange_s = run.hours * 3600 / run.steps - run.compute_s
    one_s = rounds_only_s("tree", network(run.workers, 1.0), weights(run.net))
    return one_s / exchange_s


def predicted_hours(run: Run, bandwidth: float) -> float:
    exchange_s = rounds_only_s("tree", network(run.workers, bandwidth), weights(run.net))
    return run.steps * (run.compute_s + exchange_s) / 3600


FAMILY = "firecaffe-titan"


def plan_errors(marked: bool) -> list[float | None]:
    """The errors of `plan --runs`, in hours, in the order of the runs; None for a known row.

    marked: the first row of many workers is known too.
    """
    ((rates, cluster),) = (family for family in families() if family[0].name == FAMILY)
    first, *others = rates.trainings
    if marked:
        one, two, *rest = first.rows
        first = replace(first, rows=(one, replace(two, fit=True), *rest))
    errors = [
        row.per_s / row.forecast_per_s - 1
        for row in forecast_rows(FAMILY, cluster, [first, *others])
    ]
    return [None, *errors] if marked else [*errors]


def page(path: Path) -> tuple[str, list[float], list[float]]:
    """The section; the errors of `plan` from one worker; those of the null model, *linear*."""
    runs = read_runs(path)
    bandwidth = fitted_bandwidth(runs)
    formula = [predicted_hours(run, bandwidth) / run.hours - 1 for run in runs]
    linear = [run.linear_hours / run.hours - 1 for run in runs]
    from_one, from_two = plan_errors(marked=False), plan_errors(marked=True)
    lines = [
        "## FireCaffe on Titan, 2016",
        "",
        paragraph(
            f"""Tested: hours by `plan --runs`, from the paper's single workers; then with the
            marked row known. Beside: the paper's formula, a tree without overlap at
            {bandwidth / 1e9:.2f} GB/s, fitted to that row; *linear*, one worker's rate times the
            workers. **It fails** on NiN by 8 images a worker. Source: Iandola et al. 2016 (arXiv
            1511.00175)."""
        ),
        "",
        "| net | workers | batch | published, h | `plan` | marked known | formula | *linear* |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for place, run in enumerate(runs):
        after = from_two[place]
        errors = [
            f"{from_one[place]:+.1%}",
            "known" if after is None else f"{after:+.1%}",
            "fitted" if run.fitted else f"{formula[place]:+.1%}{'i' if run.implied else ''}",
            f"{linear[place]:+.1%}",
        ]
        lines.append(
            f"| {run.net} | {run.workers} | {run.batch} | {run.hours:g} | {' | '.join(errors)} |"
        )
    return "\n".join(lines), [error for error in from_one if error is not None], linear
