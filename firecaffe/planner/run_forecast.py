"""Forecasts a run for its folder: before its first step, and again with its first steps measured.

The first forecast takes compute times from the cluster file, often from a data sheet. Measured
steps of rank 0 replace them: forward and backward, fetching samples, the update, and their scatter.
The exchange, its hidden part, and the wait for the slowest worker stay forecasts.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Self

import torch

from firecaffe.data import Data
from firecaffe.data.decode import cores
from firecaffe.errors import FirecaffeError
from firecaffe.files import write_json
from firecaffe.gradients.config import NO_COMPRESSOR
from firecaffe.planner.calibrate import MIN_ERROR, jitter_of, relative_spread
from firecaffe.planner.cluster import Cluster, MeasuredStep, crowding, slower
from firecaffe.planner.compute_time import is_measured
from firecaffe.planner.forecast import forecast
from firecaffe.planner.modes import forecast_mode, gradients_per_update
from firecaffe.planner.price import PRICED
from firecaffe.planner.recipe_layout import RecipeLayout, forecast_parallel
from firecaffe.planner.recipe_workload import NO_DATA_TIME, cluster_for, workload_of
from firecaffe.planner.step_cost import slowest_over_mean
from firecaffe.planner.workload import Workload
from firecaffe.recipe.checked_recipe import CheckedRecipe
from firecaffe.recipe.sections import Recipe
from firecaffe.runs.run_folder import FORECAST
from firecaffe.synchrony.config import EVERY_STEP
from firecaffe.synchrony.rounds import Rounds

MIN_SAMPLES = 8
"""The fewest measured steps that replace a forecast."""

IN_COMPUTE_S = 1e-9
"""The update's time if compute times include it; 0 would mean that it is unknown."""

Row = Mapping[str, Any]
"""A line of timings/rank-0.jsonl."""


@dataclass(frozen=True)
class MeasuredSteps:
    """Rank 0's times of some steps: medians, in seconds of a micro-batch."""

    first_step: int
    last_step: int
    micro_batches: float
    """Micro-batches of rank 0 in a step; with a server, of all workers."""
    compute_s: float
    data_s: float
    update_s: float
    """Seconds of a step; 0 if unknown."""
    error: float
    """Half the spread of the middle four fifths of `compute_s`, over their median."""
    jitter: float
    """The deviation of a micro-batch's time over its mean."""

    @classmethod
    def of(cls, rows: Sequence[Row], in_replicas: bool, per_update: int) -> Self | None:
        """Combine rows of timings; None if they are too few. A stage's rows describe only itself.

        in_replicas: each worker updates its own replicas, which are averaged periodically.
        per_update: the gradients that a server waits for before an update.
        """
        served = [row for row in rows if row.get("by_rank")]
        counted = [row for row in served or rows if _count(row)]
        if len(counted) < MIN_SAMPLES:
            return None
        computes_s = [
            (sum(seconds for _, seconds in _works(row)) + in_replicas * row["update_s"])
            / _count(row)
            for row in counted
        ]
        updates_s = [
            row["update_s"] * per_update / _count(row) if served else row["update_s"]
            for row in counted
        ]
        micro_batches = median(_count(row) for row in counted)
        spread = relative_spread(computes_s)
        return cls(
            first_step=counted[0]["step"],
            last_step=counted[-1]["step"],
            micro_batches=micro_batches,
            compute_s=max(1e-9, median(computes_s)),
            data_s=0.0 if served else median(row["data_s"] / _count(row) for row in counted),
            # Replicas make updates while they compute.
            update_s=IN_COMPUTE_S if in_replicas else median(updates_s),
            error=max(MIN_ERROR, spread),
            jitter=jitter_of(spread, micro_batches),
        )

    def as_measured_step(self, work: Workload) -> MeasuredStep:
        return MeasuredStep(
            model=work.model,
            micro_batch_size=work.micro_batch_size,
            compute_s=self.compute_s,
            data_s=self.data_s,
            update_s=self.update_s,
            autocast=work.autocast,
            error=self.error,
        )

    def of_step(self, micro_batches: int | None) -> tuple[float, float, float]:
        """Seconds of compute, data and update in a step; micro_batches None: as measured."""
        count = micro_batches or self.micro_batches
        return count * self.compute_s, count * self.data_s, self.update_s


def _works(row: Row) -> Sequence[tuple[int, float]]:
    """Pairs of micro-batches and seconds; with a server, one per worker, including fetching."""
    by_rank = row.get("by_rank")
    return [*by_rank.values()] if by_rank else [(row["micro_batches"], row["compute_s"])]


def _count(row: Row) -> int:
    return sum(count for count, _ in _works(row))


@dataclass(frozen=True)
class PlannedRun:
    """Everything that a run's forecast is made from, except the cluster."""

    recipe: CheckedRecipe
    workload: Workload
    workers: int
    exchange: str
    """The algorithm, as `auto` has chosen it."""
    rounds: Rounds | None
    """When replicas are averaged, in mode local."""
    chosen: Mapping[str, str] | None
    """The split layers, each with its word; empty with stages, None if none is split."""

    def on(self, cluster: Cluster) -> dict[str, Any]:
        """Forecast the run, for its folder. Raises: RecipeError, ValueError if it has no price."""
        recipe, work = self.recipe, self.workload
        if self.chosen is not None:
            layout = RecipeLayout.of(recipe, self.chosen)
            config, size = recipe.model, self.workers
            row = forecast_parallel(config, work, cluster, layout, size, self.exchange)
            return row | self._of(cluster, row["data_s"])
        planned = forecast(work, cluster, self.workers, self.exchange, recipe.exchange.compressor)
        if recipe.synchrony.mode != EVERY_STEP:
            rounds = self.rounds or Rounds(0)
            row = forecast_mode(work, cluster, planned, recipe.synchrony, rounds)
            return row | self._of(cluster, planned.data_s)
        waits = slowest_over_mean(self.workers, cluster.device.jitter, planned.micro_batches)
        stragglers_s = planned.compute_s * (1 - 1 / waits)
        of_cluster = self._of(cluster, planned.data_s)
        return {**planned.as_dict(), "stragglers_s": stragglers_s, **of_cluster}

    def _of(self, cluster: Cluster, data_s: float) -> dict[str, Any]:
        return {
            "cluster": cluster.name,
            "cluster_file": self.recipe.run.cluster,
            "about": cluster.about,
            "is_without_data": self.workload.assumption == NO_DATA_TIME and not data_s,
        }


@dataclass(frozen=True)
class FirstForecast:
    """A forecast from before the first step, with everything that refining it needs."""

    folder: Path
    run: PlannedRun
    cluster: Cluster
    row: dict[str, Any]

    def refine(self, rows: Sequence[Row]) -> str:
        """Forecast again from rank 0's timings of some steps; keep both, and return a line.

        The line is empty if the first forecast stays, as with too few steps.
        """
        in_replicas = self.row.get("average_s") is not None
        words, work = self.run.recipe.synchrony, self.run.workload
        per_update = gradients_per_update(words, work.num_micro_batches)
        measured = MeasuredSteps.of(rows, in_replicas, per_update)
        if measured is None:
            return ""
        try:
            refined = self._with(measured)
            if refined is None:
                return ""
            write_json(self.folder / FORECAST, {**self.row, "refined": refined})
        except (FirecaffeError, ValueError, OSError) as error:  # the training goes on in any case
            return f"the forecast from before the first step stays: {error}"
        return (
            f"forecast {_band(self.row)}; with compute measured in steps {measured.first_step} to "
            f"{measured.last_step}: {_band(refined)}"
        )

    def _with(self, measured: MeasuredSteps) -> dict[str, Any] | None:
        # Waits for storage are in the measured times already.
        run = replace(self.run, workload=replace(self.run.workload, stored_bytes=0.0))
        if stages_s := self.row.get("stages_s"):
            # Rank 0 has the first stage. The other stages are scaled by the same factor.
            if not stages_s[0]:  # a stage that computes nothing measures nothing
                return None
            compute_s, _, _ = measured.of_step(None)
            cluster = slower(self.cluster, compute_s / stages_s[0], 1.0)
            known = [replace(row, error=measured.error) for row in cluster.device.measured]
            device = replace(cluster.device, measured=tuple(known), jitter=measured.jitter)
            return run.on(replace(cluster, device=device)) | {"made_from": asdict(measured)}
        step, work = measured.as_measured_step(run.workload), run.workload
        shared = crowding(self.cluster, run.workers, work.threads)
        step = step.scaled(1 / shared, 1 / shared, 1 / shared)
        cluster = self._cluster(step, measured)
        if not is_measured(work, cluster.device):
            return None
        row = run.on(cluster)
        if "compute_s" in row:
            # The planner adds the slow-down by an exchange to a step, and subtracts the work of
            # other workers on split layers and sharded updates. The ratios undo both.
            wanted = measured.of_step(row.get("micro_batches"))
            planned = row["compute_s"] - row["stragglers_s"], row["data_s"], row["update_s"]
            ratios = [a / b if b else 1.0 for a, b in zip(wanted, planned, strict=True)]
            step = step.scaled(*ratios)
            row = run.on(self._cluster(step, measured))
        return row | {"made_from": asdict(measured)}

    def _cluster(self, step: MeasuredStep, measured: MeasuredSteps) -> Cluster:
        device = replace(self.cluster.device, measured=(step,), jitter=measured.jitter)
        return replace(self.cluster, device=device)


def _no_forecast(recipe: Recipe, gpu: str, world_size: int, is_several: bool) -> str:
    """Say why the run's cluster cannot price this many workers; "" if it can."""
    if recipe.synchrony.is_simulated:
        return "under the simulated clock one process does what learners would"
    if is_several and not gpu and not recipe.run.cluster:
        return "several hosts, and no run.cluster; firecaffe check measures one"
    cluster = cluster_for(recipe, gpu)
    if cluster is None:
        return ""
    if is_several and cluster.is_one_host:
        return (
            f"several hosts, and {cluster.name} is one; firecaffe check --nnodes measures several"
        )
    if 0 < cluster.most_devices < world_size:
        return f"{world_size} workers, and {cluster.name} has {cluster.most_devices} devices"
    return ""


def write_forecast(
    folder: Path,
    recipe: CheckedRecipe,
    data: Data,
    world_size: int,
    local_world_size: int,
    device: torch.device,
    algorithm: str,
    rounds: Rounds | None = None,
    chosen: Mapping[str, str] | None = None,
) -> tuple[list[str], FirstForecast | None]:
    """Write the forecast to the run's folder; return lines about it, and what can refine it.

    Several hosts without GPUs or a cluster file have none, as their link is unknown. Arguments: see
    `PlannedRun`. Raises: RecipeError if the recipe's cluster does not exist.
    """
    (folder / FORECAST).unlink(missing_ok=True)  # of an attempt on other hosts
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    is_several = local_world_size < world_size
    if why := _no_forecast(recipe, name, world_size, is_several):
        return [f"no forecast: {why}"], None
    cluster = cluster_for(recipe, name)
    if cluster is None or recipe.exchange.compressor not in (NO_COMPRESSOR, *PRICED):
        return [], None
    if not name and not recipe.run.cluster:
        cluster = replace(cluster, cores_per_node=_cores())
    try:
        work = workload_of(recipe, data)
        run = PlannedRun(recipe, work, world_size, algorithm, rounds, chosen)
        predicted = run.on(cluster)
    except (FirecaffeError, ValueError) as error:  # the run starts without a forecast
        return ([f"no forecast: {error}"] if chosen is not None else []), None
    write_json(folder / FORECAST, predicted)
    return [_line(predicted)], FirstForecast(folder, run, cluster, predicted)


def _cores() -> int:
    """This host's cores; 0 if this rank is bound to some, which it may not share."""
    count = cores()
    return 0 if count < (os.cpu_count() or count) else count


def _line(predicted: Row) -> str:
    said = f"{predicted['images_per_s']:,.0f} samples/s on {predicted['cluster']}"
    without_data = "; without the time that the data take" * predicted["is_without_data"]
    return f"forecast: {_band(predicted, ' a step')}, {said}{_kind(predicted)}{without_data}"


def _kind(predicted: Row) -> str:
    """Say what a forecast of its kind has besides the step; "" for a whole network every step."""
    if "mode" in predicted:
        mode, average_s = f" in mode {predicted['mode_in_words']}", predicted["average_s"]
        if average_s is not None:
            return f"{mode}; an average takes {average_s * 1e3:.3g} ms"
        megabytes = predicted["bytes_per_step"] / 1e6
        return f"{mode}; staleness {predicted['staleness']:.2f}, {megabytes:,.3g} MB a step"
    if "parallel" not in predicted:
        return ""
    if predicted["parallel"]["stages"]:
        return f"; {predicted['idle']:.0%} of it a stage does not compute"
    between, gradients = predicted["activations_s"], predicted["exposed_communication_s"]
    return f"; {between * 1e3:.3g} ms for activations, {gradients * 1e3:.3g} for gradients"


def _band(row: Row, unit: str = "") -> str:
    low, high = row["step_low_s"] * 1e3, row["step_high_s"] * 1e3
    return f"{row['step_s'] * 1e3:.3g} ms{unit} ({low:.3g} to {high:.3g})"
