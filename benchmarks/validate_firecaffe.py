"""FireCaffe's own runs, from one fitted bandwidth.

The time of a run is its steps, each (b / p) images and the paper's exchange after them: a tree of
whole vectors, 2 lg p of them one after the other, nothing overlapped. Which row the bandwidth is
fitted to is marked in the data file; the rates of one worker are those of the paper's own
baselines. `firecaffe plan` prices a training otherwise: it overlaps, in buckets, from a device's
figures and not from a measured baseline.

Source: Iandola et al. 2016 (arXiv 1511.00175), its tables of NiN and GoogLeNet.
"""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from benchmarks.paragraph import paragraph
from firecaffe.models.config import ModelConfig
from firecaffe.planner.cluster import load_cluster
from firecaffe.planner.price import rounds_only_s
from firecaffe.planner.published_trainings import IMAGENET_IMAGES
from firecaffe.planner.simulate import Network
from firecaffe.planner.workload import layers_of


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


def page(path: Path) -> tuple[str, list[float], list[float]]:
    """The section of the page, and the errors of what was not fitted: the model's, and those of
    the null model.
    """
    runs = read_runs(path)
    bandwidth = fitted_bandwidth(runs)
    errors, linear_errors = [], []
    rows = []
    for run in runs:
        hours = predicted_hours(run, bandwidth)
        error, linear_error = hours / run.hours - 1, run.linear_hours / run.hours - 1
        said = "fitted" if run.fitted else f"{error:+.1%}{'i' if run.implied else ''}"
        if not run.fitted:
            errors.append(error)
            linear_errors.append(linear_error)
        rows.append(
            f"| {run.net} | {run.workers} | {run.batch} | {run.hours:g} | {hours:.2f} | {said} | "
            f"{linear_error:+.1%} |"
        )
    lines = [
        "## FireCaffe on Titan, 2016",
        "",
        paragraph(
            f"""Tested: the formula of a binomial tree of whole vectors, without overlap, after
            computing at the speed of the paper's own single workers. Not tested: the rest of
            `plan`. One bandwidth is fitted, to the marked row: {bandwidth / 1e9:.2f} GB/s. *Linear*
            is one worker's rate times the workers. Source: Iandola et al. 2016
            (arXiv 1511.00175)."""
        ),
        "",
        "| net | workers | batch | published, h | predicted, h | error | linear's error |",
        "|---|---|---|---|---|---|---|",
        *rows,
    ]
    return "\n".join(lines), errors, linear_errors
