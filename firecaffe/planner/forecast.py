"""Forecasts a workload on a number of workers of a cluster, with one exchange.

Times have a band: computing is off by the device's error and exchanges by the link's, both to the
same side. Memory has a band for what libraries may hold. A band covers what is unknown about the
cluster, not the scatter of runs. Failures and checkpoints cost time by Daly 2006 ("A higher order
estimate of the optimum checkpoint interval for restart dumps"), first order. Epochs: `EpochsLaw`.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import ceil, exp, expm1, inf, sqrt
from typing import Any

from firecaffe.errors import RecipeError
from firecaffe.exchange import AUTO, EXCHANGES
from firecaffe.exchange.leaves import num_nodes
from firecaffe.gradients.config import NO_COMPRESSOR
from firecaffe.planner.cluster import Cluster, on_cores
from firecaffe.planner.compute_time import error_of
from firecaffe.planner.epochs_law import Epochs
from firecaffe.planner.memory import memory_band, memory_bytes, on_device
from firecaffe.planner.price import PRICED
from firecaffe.planner.simulate import Network
from firecaffe.planner.step_cost import Scales, Step, StepCost, recipe_exchange, route_of
from firecaffe.planner.update_price import update_of
from firecaffe.planner.workload import Workload
from firecaffe.resume_advice import option
from firecaffe.value_checks import count_of


def time_between_failures_s(failures_per_node_hour: float, nodes: int) -> float:
    rate = failures_per_node_hour * nodes / 3600
    return inf if rate == 0 else 1 / rate


def best_interval_s(checkpoint_s: float, between_s: float) -> float:
    """The training time between two checkpoints that loses least: sqrt(2 · cost · between)."""
    return inf if between_s == inf else sqrt(2 * checkpoint_s * between_s)


def goodput(checkpoint_s: float, restart_s: float, interval_s: float, between_s: float) -> float:
    """The share of time left for training if failures are random (Daly 2006, equation 13)."""
    if between_s == inf:
        return 1.0 if interval_s == inf else interval_s / (interval_s + checkpoint_s)
    span, restart = (interval_s + checkpoint_s) / between_s, restart_s / between_s
    if span + restart > MAX_EXPONENT:
        return 0.0
    return interval_s / (between_s * exp(restart) * expm1(span))


MAX_EXPONENT = 500.0
"""Far below 709, where exp overflows."""
MIN_GOODPUT = 0.001
"""With a smaller share of time left by failures, a training is said not to end."""
MAX_ERROR = 0.9
MIN_GAIN_OF_A_WORKER = 0.5
"""The share of one worker's rate that a further worker must add to be useful."""


@dataclass(frozen=True)
class Forecast:
    """One row of a plan; times are seconds of one step unless their name says otherwise."""

    workers: int
    exchange: str
    compressor: str
    keeps_bits: bool
    """Whether the training ends in the bits of one worker."""
    micro_batches: int
    """Micro-batches of the busiest worker."""
    step_s: float
    low: Step
    high: Step
    """The step at the lower and the upper end of the band."""
    compute_s: float
    exposed_communication_s: float
    data_s: float
    update_s: float
    exchange_s: float
    images_per_s: float
    speedup: float
    efficiency: float
    memory_bytes: dict[str, float]
    memory_low_bytes: float
    memory_high_bytes: float
    fits: bool
    """Whether the counted memory suffices; memory_high_bytes may not fit."""
    goodput: float
    """The share of time left by failures and checkpoints; 0 if the training does not end."""
    epochs_to_accuracy: Epochs | None
    hours: float | None
    hours_to_accuracy: float | None
    """A lower bound if epochs_to_accuracy.is_at_least."""
    usd: float | None
    kwh: float | None

    @property
    def step_low_s(self) -> float:
        return self.low.step_s

    @property
    def step_high_s(self) -> float:
        return self.high.step_s

    @property
    def whole_hours(self) -> float | None:
        """The hours of the recipe's steps, or else those to the accuracy."""
        return self.hours_to_accuracy if self.hours is None else self.hours

    @property
    def is_at_least(self) -> bool:
        """Whether `whole_hours` are a lower bound."""
        epochs = self.epochs_to_accuracy
        return self.hours is None and epochs is not None and epochs.is_at_least

    def as_dict(self) -> dict[str, Any]:
        band = {"step_low_s": self.step_low_s, "step_high_s": self.step_high_s}
        return {**asdict(self), **band}


def exchanges_on(cluster: Cluster, world_size: int) -> list[str]:
    """List the exchanges for `world_size` workers, and a nested one if they fill several nodes."""
    inner = cluster.links[0].group
    nests = inner and world_size > inner and world_size % inner == 0
    return [*EXCHANGES, *(["hierarchical(tree,halving_doubling)"] if nests else [])]


def check_plan(workload: Workload, cluster: Cluster, world_size: int, row_size: int = 1) -> None:
    """Raise RecipeError for an impossible number of workers. row_size: workers of one model."""
    if world_size < 1:
        raise RecipeError(f"{option('workers')} is {world_size}; it must be at least 1")
    leaves = workload.num_micro_batches
    if world_size // row_size > leaves:
        raise RecipeError(
            f"{world_size} workers but only {count_of(leaves, 'micro-batch', 'micro-batches')} a "
            f"step (train.global_batch_size {workload.global_batch_size} / train.micro_batch_size "
            f"{workload.micro_batch_size}); plan for at most "
            f"{count_of(leaves, 'worker', 'workers')}, or take a larger batch"
            + " or smaller micro-batches"
            * (workload.micro_batch_size > 1)
        )
    if cluster.most_devices and world_size > cluster.most_devices:
        of_one = "; a check on several hosts (--nnodes) measures more" * cluster.is_one_host
        raise RecipeError(
            f"{world_size} workers, but {cluster.name} has {cluster.most_devices} devices{of_one}"
        )


def forecast(
    workload: Workload,
    cluster: Cluster,
    world_size: int,
    exchange: str,
    compressor: str = NO_COMPRESSOR,
) -> Forecast:
    """Forecast one row. Raises: RecipeError; ValueError if the exchange excludes the workers."""
    check_plan(workload, cluster, world_size)
    if compressor != NO_COMPRESSOR:
        _check_nodes(workload, world_size)
    shared, alone = (on_cores(cluster, size, workload.threads) for size in (world_size, 1))
    cost = StepCost(workload, shared, exchange, compressor)
    step = cost.step(world_size)
    one = cost if alone is shared else StepCost(workload, alone, exchange, compressor)
    alone_s = one.step(1).step_s
    low, high = _band(cost, world_size, errors_of(workload, cluster, world_size, compressor))
    counted = memory_bytes(cost.workload, world_size, cost.in_memory(world_size))
    memory = on_device(counted, cluster.device)
    memory_low, memory_high = memory_band(memory)
    hosts = ceil(world_size / cluster.devices_per_node)
    kept = _goodput(cluster, memory, hosts)
    hours = workload.steps * step.step_s / kept / 3600 if workload.steps and kept else None
    law = workload.law
    epochs = None if law is None else law.epochs_at(workload.global_batch_size)
    to_accuracy = None
    if epochs is not None and workload.samples and kept:
        steps = epochs.epochs * ceil(workload.samples / workload.global_batch_size)
        to_accuracy = steps * step.step_s / kept / 3600
    whole_hours = to_accuracy if hours is None else hours
    kwh = _kwh(cluster, hosts, world_size, whole_hours)
    route = route_of(cost.workload, exchange, Network(cluster.links, world_size))
    return Forecast(
        workers=world_size,
        exchange=exchange,
        compressor=compressor,
        keeps_bits=compressor != NO_COMPRESSOR or route.is_invariant,
        micro_batches=ceil(workload.num_micro_batches / world_size),
        step_s=step.step_s,
        low=low,
        high=high,
        compute_s=step.compute_s,
        exposed_communication_s=step.exposed_communication_s,
        data_s=step.data_s,
        update_s=step.update_s,
        exchange_s=step.exchange_s,
        images_per_s=workload.global_batch_size / step.step_s,
        speedup=alone_s / step.step_s,
        efficiency=alone_s / step.step_s / world_size,
        memory_bytes=memory,
        memory_low_bytes=memory_low,
        memory_high_bytes=memory_high,
        fits=sum(memory.values()) <= cluster.device.memory_bytes,
        goodput=kept,
        epochs_to_accuracy=epochs,
        hours=hours,
        hours_to_accuracy=to_accuracy,
        usd=_usd(cluster, hosts, whole_hours, kwh),
        kwh=kwh,
    )


def _band(cost: StepCost, world_size: int, errors: tuple[float, float]) -> tuple[Step, Step]:
    """The steps with all uncertain figures at their lower ends, and at their upper ends."""
    device, storage = cost.cluster.device, cost.cluster.storage
    compute, exchange = errors
    read = storage.error if storage else 0.0
    jitter, slowdown = 1 + device.jitter_error, 1 + device.slowdown_error
    low = Scales(1 - compute, 1 - exchange, 1 - read, 1 / jitter, 1 / slowdown)
    high = Scales(1 + compute, 1 + exchange, 1 + read, jitter, slowdown)
    return cost.step(world_size, low), cost.step(world_size, high)


def _check_nodes(workload: Workload, world_size: int) -> None:
    nodes = num_nodes(workload.num_micro_batches, workload.compressor_level)
    if world_size > nodes:
        raise RecipeError(
            f"{world_size} workers but only {count_of(nodes, 'sum', 'sums')} of "
            f"{1 << workload.compressor_level} micro-batches to encode (exchange.compressor_level "
            f"{workload.compressor_level}); plan for at most "
            f"{count_of(nodes, 'worker', 'workers')} or a lower level"
        )


def errors_of(
    workload: Workload, cluster: Cluster, world_size: int, compressor: str = NO_COMPRESSOR
) -> tuple[float, float]:
    link_error = Network(cluster.links, world_size).outermost.error
    exchange_error = link_error * (1 if compressor == NO_COMPRESSOR else 2)
    return (
        min(MAX_ERROR, error_of(workload, cluster.device)),
        min(MAX_ERROR, exchange_error),
    )


def forecasts(
    workload: Workload,
    cluster: Cluster,
    workers: Sequence[int],
    exchanges: Sequence[str] | None = None,
    compressors: Sequence[str] = (NO_COMPRESSOR,),
) -> list[Forecast]:
    """Forecast each number of workers with each exchange, also the workload's, and compressor."""
    rows = []
    for world_size in workers:
        check_plan(workload, cluster, world_size)
        chosen = exchanges_on(cluster, world_size) if exchanges is None else exchanges
        if exchanges is None and update_of(workload, world_size).to_owners:
            chosen = [recipe_exchange(workload, cluster, world_size) or "tree"]
        chosen = chosen if world_size > 1 else ["tree"]  # a single worker has no exchange
        is_plain = NO_COMPRESSOR in compressors or world_size == 1
        rows += [forecast(workload, cluster, world_size, name) for name in chosen if is_plain]
        is_missing = exchanges is None and workload.exchange not in ("", AUTO, *chosen)
        if is_missing and is_plain and world_size > 1:
            with suppress(ValueError):  # hierarchical ones do not fit all numbers of workers
                rows.append(forecast(workload, cluster, world_size, workload.exchange))
        rows += [
            forecast(workload, cluster, world_size, "tree", compressor)
            for compressor in compressors
            if compressor in PRICED and world_size > 1
        ]
    return rows


def is_own(row: Forecast, workload: Workload, cluster: Cluster) -> bool:
    """Whether the row has the exchange and the compressor of the training."""
    if row.workers == 1 or row.compressor != workload.compressor:
        return False
    is_encoded = row.compressor != NO_COMPRESSOR
    return is_encoded or row.exchange == recipe_exchange(workload, cluster, row.workers)


def fastest(rows: Sequence[Forecast]) -> list[Forecast]:
    """The fastest row of each number of workers; one that changes bits only if no other."""
    return [min(own, key=lambda row: not row.keeps_bits) for _, own in by_workers(rows)]


def most_useful(rows: Sequence[Forecast]) -> int:
    """The largest number of workers at which further ones bring MIN_GAIN_OF_A_WORKER each."""
    useful, speedup = 1, 1.0
    for row in fastest(rows):
        more = row.workers - useful
        if more > 0 and row.speedup - speedup >= MIN_GAIN_OF_A_WORKER * more:
            useful, speedup = row.workers, row.speedup
    return useful


def _goodput(cluster: Cluster, memory: dict[str, float], nodes: int) -> float:
    between_s = time_between_failures_s(cluster.failures_per_node_hour, nodes)
    if between_s == inf:
        return 1.0
    state = memory["parameters"] + memory["optimizer"]
    rate = (
        cluster.storage.read_bytes_per_s if cluster.storage else cluster.device.memory_bytes_per_s
    )
    cost_s = state / rate
    interval_s = best_interval_s(cost_s, between_s)
    kept = goodput(cost_s, cluster.restart_s, interval_s, between_s)
    return kept if kept >= MIN_GOODPUT else 0.0


def _usd(cluster: Cluster, nodes: int, hours: float | None, kwh: float | None) -> float | None:
    prices = cluster.prices
    if hours is None or not (prices.node_usd_per_hour or prices.electricity_usd_per_kwh):
        return None
    return hours * nodes * prices.node_usd_per_hour + (kwh or 0) * prices.electricity_usd_per_kwh


def _kwh(cluster: Cluster, nodes: int, workers: int, hours: float | None) -> float | None:
    power_w = nodes * cluster.prices.power_w or workers * cluster.device.power_w
    return None if hours is None or not power_w else hours * power_w / 1000


def by_workers(rows: Sequence[Forecast]) -> Iterator[tuple[int, list[Forecast]]]:
    """Yield each number of workers with its rows, the fastest first."""
    for workers in sorted({row.workers for row in rows}):
        group = [row for row in rows if row.workers == workers]
        yield workers, sorted(group, key=lambda row: row.step_s)
