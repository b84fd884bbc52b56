"""Fits a cluster's parameters to measurements and to finished runs.

Fits use relative errors, so a millisecond and a minute count equally. Parameters are above 0.

A run's steps replace the figures for its network (`device.measured`) and the scatter of ranks
(`device.jitter`). A link's bandwidth is fitted to the runs whose outermost link it is, its latency
only if there are LATENCY_RUNS of them. Runs whose step hardly depends on the bandwidth are left
out. A link stays unchanged if the steps hardly depend on its fitted rate either.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isnan, log, sqrt
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
from numpy.typing import NDArray

from firecaffe.data.dataset import tree_text
from firecaffe.errors import RunError
from firecaffe.planner.cluster import Cluster, Link, MeasuredStep
from firecaffe.planner.forecast import forecast
from firecaffe.planner.recipe_workload import workload_of
from firecaffe.planner.simulate import Network
from firecaffe.planner.step_cost import slowest_over_mean
from firecaffe.planner.workload import Workload
from firecaffe.recipe.checked_recipe import recipe_of_run
from firecaffe.runs.rank_times import require_timings
from firecaffe.runs.run_folder import FORECAST, read_run_file
from firecaffe.runs.schemas import LearnableForecast
from firecaffe.runs.score import measured_parts

Model = Callable[[Mapping[str, float], Any], float]
"""(parameters, a row's conditions) -> the predicted measurement."""


@dataclass(frozen=True)
class CalibrationFit:
    values: dict[str, float]
    errors: dict[str, float]
    rows: int
    held_out_error: float
    """Median relative error of rows predicted from the others; NaN if no row can be spared."""


def fit(
    model: Model,
    start: Mapping[str, float],
    rows: Sequence[tuple[Any, float]],
    hold_out: bool = True,
) -> CalibrationFit:
    """Fit parameters to rows of (conditions, measured), from rough values in `start`.

    Raises: ValueError if there are fewer rows than parameters, or a value is not above 0.
    """
    # The import takes half a second, and most importers of this file do not fit.
    from scipy.optimize import least_squares

    names = list(start)
    if len(rows) < len(names):
        raise ValueError(
            f"{len(rows)} measurements do not bear {len(names)} parameters ({', '.join(names)})"
        )
    if min([*start.values(), *(measured for _, measured in rows)], default=1.0) <= 0:
        raise ValueError("what is fitted, and its start, must be above 0")

    def residuals(logs: NDArray[np.float64]) -> list[float]:
        values = dict(zip(names, np.exp(logs).tolist(), strict=True))
        return [log(model(values, conditions) / measured) for conditions, measured in rows]

    begin = np.log([start[name] for name in names])
    solution = least_squares(residuals, begin, loss="soft_l1", f_scale=0.1)
    values = dict(zip(names, np.exp(solution.x).tolist(), strict=True))
    freedom = max(1, len(rows) - len(names))
    variance = float(np.sum(np.square(residuals(solution.x)))) / freedom
    slopes = np.asarray(solution.jac, dtype=float)
    covariance = np.linalg.pinv(slopes.T @ slopes) * variance
    errors = dict(zip(names, np.sqrt(np.diag(covariance)).tolist(), strict=True))
    missed = []
    if hold_out and len(rows) > len(names):
        for index, (conditions, measured) in enumerate(rows):
            others = [row for place, row in enumerate(rows) if place != index]
            guess = fit(model, values, others, hold_out=False).values
            missed.append(abs(model(guess, conditions) / measured - 1))
    return CalibrationFit(values, errors, len(rows), median(missed) if missed else float("nan"))


def relative_spread(samples: Sequence[float]) -> float:
    """Half the width of the middle four fifths, over the median."""
    tenths = quantiles(samples, n=10)
    return (tenths[-1] - tenths[0]) / 2 / median(samples)


def jitter_of(spread: float, micro_batches: float) -> float:
    """The deviation of a micro-batch's time over its mean, by the `relative_spread` of steps.

    The middle four fifths of normal samples are 2.56 standard deviations wide. A step varies less
    than a micro-batch, because its micro-batches vary independently.
    """
    return spread * sqrt(micro_batches) / 1.28


LATENCY_RUNS = 3
MIN_CHANGE = 0.03
"""The share of a step that halving a link's bandwidth must add; else its fit omits the run."""
MIN_ERROR = 0.02
"""Least error of a time that was measured in one run."""


@dataclass(frozen=True)
class FinishedRun:
    folder: Path
    workload: Workload
    world_size: int
    exchange: str
    compressor: str
    parts: dict[str, float]
    """Seconds of a step, as in `runs.score.measured_parts`."""
    error: float
    """Half the spread of its compute times, over their median."""

    @property
    def micro_batches(self) -> float:
        return self.workload.num_micro_batches / self.world_size


def learn(
    cluster: Cluster, folders: Sequence[Path], *, trust_code: bool = False
) -> tuple[Cluster, list[str]]:
    """Correct the cluster by the runs in these folders; also return a line for each correction.

    trust_code: whether the runs' code may be executed. Raises: RunError if a run has no forecast.
    """
    runs = [_read(folder, trust_code) for folder in folders]
    rows = _rows(runs, cluster)
    of_any_inputs = (replace(row, inputs="") for row in rows)
    new = {row.conditions for row in (*rows, *of_any_inputs)}
    kept = [row for row in cluster.device.measured if row.conditions not in new]
    device = replace(cluster.device, measured=(*kept, *rows))
    scatter = [
        run.parts["stragglers_s"]
        / run.parts["compute_s"]
        / (slowest_over_mean(run.world_size, 1.0, run.micro_batches) - 1)
        for run in runs
        if run.world_size > 1
    ]
    said = [
        f"{row.model}: {row.compute_s * 1e3:.4g} ms a micro-batch of {row.micro_batch_size}, "
        f"within {row.error:.0%}"
        for row in rows
    ]
    if scatter:
        device = replace(device, jitter=median(scatter))
        said.append(f"a rank's micro-batch scatters by {device.jitter:.1%}")
    sources = tuple(dict.fromkeys([*cluster.sources, *(f"run: {run.folder.name}" for run in runs)]))
    learned = replace(cluster, device=device, sources=sources)
    by_level: dict[int, list[FinishedRun]] = defaultdict(list)
    for run in runs:
        if run.world_size > 1:
            network = Network(cluster.links, run.world_size)
            by_level[network.level(0, run.world_size - 1)].append(run)
    for level, level_runs in sorted(by_level.items()):
        learned, line = _with_link(learned, level, level_runs)
        said.append(line)
    return learned, said


def _read(folder: Path, trust_code: bool) -> FinishedRun:
    if not (folder / FORECAST).is_file():
        raise RunError(f"{folder}: has no {FORECAST}; only a run that was forecast teaches a plan")
    predicted = read_run_file(folder, FORECAST)
    if "mode" in predicted:
        raise RunError(
            f"{folder}: is of synchrony.mode {predicted['mode']}; a plan learns from runs of "
            "every_step"
        )
    if "parallel" in predicted:
        raise RunError(
            f"{folder}: its network is split over workers; a plan learns from whole networks"
        )
    predicted = read_run_file(folder, FORECAST, LearnableForecast)
    recipe = recipe_of_run(folder, trust_code=trust_code)
    timings = require_timings(folder)
    computed = [[row["compute_s"] for row in rows[1:]] for rows in timings.values()]
    scatter = [relative_spread(seconds) for seconds in computed if len(seconds) > 1]
    return FinishedRun(
        folder,
        workload_of(recipe),
        len(timings),
        predicted["exchange"],
        predicted["compressor"],
        measured_parts(timings),
        max(MIN_ERROR, median(scatter)) if scatter else 0.5,
    )


def _alone_s(run: FinishedRun, cluster: Cluster) -> float:
    """Compute seconds of a step, without the forecast slowdown by its exchange."""
    if run.world_size == 1 or not cluster.device.exchange_slowdown:
        return run.parts["compute_s"]
    unslowed = replace(cluster, device=replace(cluster.device, exchange_slowdown=0.0))
    alone_s, beside_s = (
        forecast(run.workload, variant, run.world_size, run.exchange, run.compressor).compute_s
        for variant in (unslowed, cluster)
    )
    return run.parts["compute_s"] * alone_s / beside_s


def _rows(runs: Sequence[FinishedRun], cluster: Cluster) -> list[MeasuredStep]:
    """Merge runs of the same network and size: medians, with their differences as error."""
    by_case: dict[tuple[str, str, str, int], list[FinishedRun]] = defaultdict(list)
    for run in runs:
        work = run.workload
        inputs = tree_text(work.layout.inputs)
        by_case[work.model, work.autocast, inputs, work.micro_batch_size].append(run)
    rows = []
    for (model, autocast, inputs, size), same_case in by_case.items():
        each_s = [_alone_s(run, cluster) / run.micro_batches for run in same_case]
        middle_s = median(each_s)
        differ = (max(each_s) - min(each_s)) / 2 / middle_s
        rows.append(
            MeasuredStep(
                model=model,
                micro_batch_size=size,
                compute_s=middle_s,
                data_s=median(run.parts["data_s"] / run.micro_batches for run in same_case),
                update_s=median(run.parts["update_s"] for run in same_case),
                autocast=autocast,
                inputs=inputs,
                error=max(differ, *(run.error for run in same_case)),
            )
        )
    return rows


def _with_link(cluster: Cluster, level: int, runs: Sequence[FinishedRun]) -> tuple[Cluster, str]:
    link, with_link = cluster.links[level], partial(cluster.with_link, level)

    def step_s(changed: Cluster, run: FinishedRun) -> float:
        row = forecast(run.workload, changed, run.world_size, run.exchange, run.compressor)
        return run.parts["compute_s"] + row.exposed_communication_s

    # Ranks of one host that add in shared memory send nothing.
    in_memory = level == 0 and link.memory_bytes_per_s > 0
    word = "memory_bytes_per_s" if in_memory else "bandwidth_bytes_per_s"
    before = getattr(link, word)

    def bears(run: FinishedRun, **values: float) -> bool:
        whole_s = step_s(with_link(**values), run)
        half_s = step_s(with_link(**{**values, word: values[word] / 2}), run)
        return half_s - whole_s > MIN_CHANGE * whole_s

    bearing = [run for run in runs if bears(run, **{word: before})]
    if not bearing:
        return cluster, f"{link.name}: stays as it was; its exchanges are hidden in these runs"
    start = {word: before}
    if len(bearing) >= LATENCY_RUNS and link.latency_s and not in_memory:
        start["latency_s"] = link.latency_s
    rows = [(run, run.parts["compute_s"] + run.parts["exchange_s"]) for run in bearing]
    fitted = fit(lambda values, run: step_s(with_link(**values), run), start, rows)
    if not any(bears(run, **fitted.values) for run in bearing):
        return cluster, (
            f"{link.name}: stays as it was; these runs waited less for it than its latency of "
            f"{link.latency_s * 1e6:.3g} µs would let them, which says nothing of its rate"
        )
    error = max(_error(fitted, link, word), *(run.error for run in bearing))
    rate = fitted.values[word]
    latency_s = fitted.values.get("latency_s", link.latency_s)
    held_out = "" if isnan(fitted.held_out_error) else f"; held out {fitted.held_out_error:.1%}"
    return (
        with_link(**fitted.values, error=error),
        f"{link.name}: {rate / 1e6:.4g} MB/s (was {before / 1e6:.4g}), "
        f"latency {latency_s * 1e6:.3g} µs, within {error:.0%}, from {len(rows)} runs{held_out}",
    )


def _error(fitted: CalibrationFit, link: Link, word: str) -> float:
    if isnan(fitted.held_out_error):
        return link.error
    return max(fitted.errors[word], fitted.held_out_error)
