"""The forecast: a workload on so many workers of a cluster, by one exchange.

Every figure has a band: compute times may be off by the device's error and exchange times by the
link's, both to the same side; memory by what libraries may hold. A band says what is known of the
cluster, not what a run scatters.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from math import ceil, inf
from typing import Any

from firecaffe.errors import RecipeError
from firecaffe.exchange import EXCHANGES, NATIVE
from firecaffe.exchange.leaves import num_nodes
from firecaffe.exchange.route import find_route
from firecaffe.exchange.schedule import ALL_GATHER, REDUCE_SCATTER
from firecaffe.gradients.config import NO_COMPRESSOR
from firecaffe.plan.accuracy import IMAGENET_IMAGES, LAWS
from firecaffe.plan.cluster import Cluster
from firecaffe.plan.codec import PRICED, coded_s
from firecaffe.plan.compute import data_s, error_of, micro_batch, update_s
from firecaffe.plan.goodput import best_interval_s, goodput, time_between_failures_s
from firecaffe.plan.memory import memory_band, memory_bytes
from firecaffe.plan.network import Network
from firecaffe.plan.price import Prices, ranks_per_node
from firecaffe.plan.shards import shards_of, shards_s
from firecaffe.plan.timeline import Bucket, Step, buckets_of, overlap, slowest_of
from firecaffe.plan.workload import Workload

MOST_ERROR = 0.9
LEAST_GAIN_OF_A_WORKER = 0.5
"""Share of what one worker does alone that a further one must bring to be worth having."""


@dataclass(frozen=True)
class Forecast:
    """One row of a plan. Times are seconds of one step unless they say otherwise."""

    workers: int
    exchange: str
    compressor: str
    micro_batches: int
    """Micro-batches of the busiest worker."""
    step_s: float
    low: Step
    high: Step
    """The same step at the lower and the upper end of the band."""
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
    """Whether memory as it is counted suffices; memory_high_bytes may not fit."""
    goodput: float
    """The share of time that failures, restarts and checkpoints leave."""
    epochs_to_accuracy: float | None
    hours: float | None
    """Time of the whole training: the recipe's steps."""
    hours_to_accuracy: float | None
    usd: float | None
    kwh: float | None

    @property
    def step_low_s(self) -> float:
        return self.low.step_s

    @property
    def step_high_s(self) -> float:
        return self.high.step_s

    def as_dict(self) -> dict[str, Any]:
        band = {"step_low_s": self.step_low_s, "step_high_s": self.step_high_s}
        return {**asdict(self), **band}


def exchanges_on(cluster: Cluster, world_size: int) -> list[str]:
    """Those that can be on so many workers: the table, and a nested one if there are nodes."""
    inner = cluster.links[0].group
    nests = inner and world_size > inner and world_size % inner == 0
    return [*EXCHANGES, *(["hierarchical(tree,halving_doubling)"] if nests else [])]


def check_plan(workload: Workload, cluster: Cluster, world_size: int, row_size: int = 1) -> None:
    """row_size: the workers that hold one model, and share its micro-batches.

    Raises: RecipeError if so many workers cannot do this.
    """
    if world_size < 1:
        raise RecipeError(f"--workers is {world_size}; it must be at least 1")
    if world_size // row_size > workload.num_micro_batches:
        raise RecipeError(
            f"{world_size} workers but only {workload.num_micro_batches} micro-batches a step "
            f"(train.global_batch_size {workload.global_batch_size} / train.micro_batch_size "
            f"{workload.micro_batch_size}); plan for at most {workload.num_micro_batches} workers "
            "or take smaller micro-batches"
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
    """One row. Raises: RecipeError if it cannot be; ValueError if there is no such exchange
    among so many workers.
    """
    check_plan(workload, cluster, world_size)
    nodes = num_nodes(workload.num_micro_batches, workload.compressor_level)
    if compressor != NO_COMPRESSOR and world_size > nodes:
        raise RecipeError(
            f"{world_size} workers but only {nodes} sums of {1 << workload.compressor_level} "
            f"micro-batches to encode (exchange.compressor_level {workload.compressor_level}); "
            f"plan for at most {nodes} workers or a lower level"
        )
    cost = _Cost(workload, cluster, exchange, compressor)
    step = cost.step(world_size)
    alone_s = cost.step(1).step_s
    compute_error, exchange_error = errors_of(workload, cluster, world_size, compressor)
    read_error = cluster.storage.error if cluster.storage else 0.0
    low = cost.step(world_size, 1 - compute_error, 1 - exchange_error, 1 - read_error)
    high = cost.step(world_size, 1 + compute_error, 1 + exchange_error, 1 + read_error)
    memory = memory_bytes(cost.workload, world_size, cost.in_memory(world_size))
    memory_low, memory_high = memory_band(memory)
    hosts = ceil(world_size / cluster.devices_per_node)
    kept = _goodput(cluster, memory, hosts)
    hours = workload.steps * step.step_s / kept / 3600 if workload.steps and kept else None
    is_imagenet = (workload.samples, workload.num_classes) == (IMAGENET_IMAGES, 1000)
    law = LAWS.get(workload.model) if is_imagenet else None
    epochs = law.epochs_at(workload.global_batch_size) if law is not None else None
    to_accuracy = None
    if epochs is not None and workload.samples and kept:
        steps = epochs * ceil(workload.samples / workload.global_batch_size)
        to_accuracy = steps * step.step_s / kept / 3600
    costly_hours = hours if hours is not None else to_accuracy
    kwh = _kwh(cluster, hosts, world_size, costly_hours)
    return Forecast(
        workers=world_size,
        exchange=exchange,
        compressor=compressor,
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
        usd=_usd(cluster, hosts, costly_hours, kwh),
        kwh=kwh,
    )


def errors_of(
    workload: Workload, cluster: Cluster, world_size: int, compressor: str = NO_COMPRESSOR
) -> tuple[float, float]:
    """How far off the times of computing, and of exchanges, may be, as a share of them."""
    network = Network(cluster.links, world_size)
    link_error = network.links[network.level(0, world_size - 1)].error
    exchange_error = link_error * (1 if compressor == NO_COMPRESSOR else 2)
    return (
        min(MOST_ERROR, error_of(workload, cluster.device)),
        min(MOST_ERROR, exchange_error),
    )


def forecasts(
    workload: Workload,
    cluster: Cluster,
    workers: Sequence[int],
    exchanges: Sequence[str] | None = None,
    compressors: Sequence[str] = (NO_COMPRESSOR,),
) -> list[Forecast]:
    """All workers with all exchanges, the workload's own among them; a compressor has a way of its
    own, and is a row of it.
    """
    rows = []
    for world_size in workers:
        check_plan(workload, cluster, world_size)
        chosen = exchanges_on(cluster, world_size) if exchanges is None else exchanges
        if workload.in_shards and exchanges is None:
            chosen = [workload.exchange or "tree"]
        chosen = chosen if world_size > 1 else ["tree"]  # which one alone has no say in
        is_plain = NO_COMPRESSOR in compressors or world_size == 1
        rows += [forecast(workload, cluster, world_size, name) for name in chosen if is_plain]
        is_missing = exchanges is None and workload.exchange not in ("", *chosen)
        if is_missing and is_plain and world_size > 1:
            with suppress(ValueError):  # not every hierarchical one is among any number of workers
                rows.append(forecast(workload, cluster, world_size, workload.exchange))
        rows += [
            forecast(workload, cluster, world_size, "tree", compressor)
            for compressor in compressors
            if compressor in PRICED and world_size > 1
        ]
    return rows


def is_own(row: Forecast, workload: Workload) -> bool:
    """Whether the row sends what the training will send, in its way."""
    is_encoded = row.compressor != NO_COMPRESSOR
    has_way = is_encoded or row.exchange == workload.exchange
    return row.workers > 1 and row.compressor == workload.compressor and has_way


def fastest(rows: Sequence[Forecast]) -> list[Forecast]:
    """The fastest row of each number of workers; `native`, the control, only if it is alone."""
    by_workers: dict[int, list[Forecast]] = {}
    for row in rows:
        by_workers.setdefault(row.workers, []).append(row)
    return [
        min(own, key=lambda row: (row.exchange == NATIVE, row.step_s))
        for _, own in sorted(by_workers.items())
    ]


def most_useful(rows: Sequence[Forecast]) -> int:
    """The largest number of workers that is still worth having: each one more than the next smaller
    such number brings LEAST_GAIN_OF_A_WORKER.
    """
    useful, speedup = 1, 1.0
    for row in fastest(rows):
        more = row.workers - useful
        if more > 0 and row.speedup - speedup >= LEAST_GAIN_OF_A_WORKER * more:
            useful, speedup = row.workers, row.speedup
    return useful


class _Cost:
    """The step of one workload by one exchange, for any number of workers."""

    def __init__(
        self, workload: Workload, cluster: Cluster, exchange: str, compressor: str
    ) -> None:
        if compressor != NO_COMPRESSOR:  # with which all update all
            workload = replace(workload, in_shards=False)
        self.workload, self.cluster = workload, cluster
        self.exchange, self.compressor = exchange, compressor
        self.one = micro_batch(workload, cluster.device, workload.micro_batch_size)
        self.buckets = buckets_of(workload, self.one)
        self._exchange_s: dict[int, list[float]] = {}
        self._shares: dict[int, float] = {}

    def step(
        self, world_size: int, compute: float = 1.0, exchange: float = 1.0, read: float = 1.0
    ) -> Step:
        """compute, exchange, read: factors on what is taken for them."""
        device, work = self.cluster.device, self.workload
        share = ceil(work.num_micro_batches / world_size)
        taken_s = [exchange * each for each in self._exchanges(world_size)]
        backward_s = compute * sum(self.one.backward_s)
        ready = [Bucket(compute * each.ready_s, each.num_elements) for each in self.buckets]
        lanes, share_beside = self._lanes(world_size), self._share_beside(world_size)
        beside_s, exposed_s = overlap(
            ready, taken_s, backward_s, lanes, share_beside, device.exchange_slowdown
        )
        own_s = compute * share * self.one.compute_s + beside_s - backward_s
        gather_s, updated = 0.0, 1.0
        if work.in_shards and world_size > 1:  # weights come back after the update
            network = Network(self.cluster.links, world_size)
            gather_s = exchange * sum(shards_s(work, network, ALL_GATHER))
            updated = shards_of(work, world_size).largest_share
        step = Step(
            compute_s=own_s * slowest_of(world_size, device.jitter, share),
            data_s=compute * share * data_s(work, device),
            exposed_communication_s=exposed_s + gather_s,
            update_s=compute * update_s(work, device, updated),
            exchange_s=sum(taken_s) + gather_s,
        )
        waits_s = storage_s(work, self.cluster, world_size, step.step_s, read)
        return replace(step, data_s=step.data_s + waits_s)

    def _exchanges(self, world_size: int) -> list[float]:
        if world_size not in self._exchange_s:
            sizes = [bucket.num_elements for bucket in self.buckets]
            network = Network(self.cluster.links, world_size)
            if world_size == 1:
                taken_s = [0.0] * len(sizes)
            elif self.compressor != NO_COMPRESSOR:
                device = self.cluster.device
                rate = device.memory_bytes_per_s * device.efficiency
                taken_s = coded_s(self.compressor, self.workload, network, rate, sizes)
            elif self.workload.in_shards:
                taken_s = shards_s(self.workload, network, REDUCE_SCATTER)
            else:
                taken_s = self._prices(network).seconds(sizes)
            self._exchange_s[world_size] = taken_s
        return self._exchange_s[world_size]

    def in_memory(self, world_size: int) -> int:
        """The workers of a host that add gradients in memory which they share."""
        network = Network(self.cluster.links, world_size)
        has_route = world_size > 1 and self.compressor == NO_COMPRESSOR
        shares = has_route and self._prices(network).across
        return ranks_per_node(network) if shares else 1

    def _prices(self, network: Network) -> Prices:
        return prices_of(self.workload, self.exchange, network)

    def _lanes(self, world_size: int) -> int:
        """How many buckets are under way at once; one if they are summed in memory."""
        has_route = world_size > 1 and self.compressor == NO_COMPRESSOR
        shares = has_route and self._prices(Network(self.cluster.links, world_size)).across
        return 1 if shares else self.cluster.lanes

    def _share_beside(self, world_size: int) -> float:
        """See `Prices.share_beside_another`; of the largest bucket, if there are several."""
        if self.cluster.lanes == 1 or self.compressor != NO_COMPRESSOR or len(self.buckets) < 2:
            return 1.0
        if world_size not in self._shares:
            network = Network(self.cluster.links, world_size)
            size = max(bucket.num_elements for bucket in self.buckets)
            prices = self._prices(network)
            self._shares[world_size] = prices.share_beside_another(size, self.cluster.lanes)
        return self._shares[world_size]


def prices_of(workload: Workload, exchange: str, network: Network) -> Prices:
    """Those of what a training would take: at some numbers of workers another exchange stands in.

    Raises: ValueError if there is no such exchange among so many workers.
    """
    route = find_route(
        exchange,
        workload.num_micro_batches,
        network.world_size,
        ranks_per_node(network),
        shared_memory=workload.shared_memory and network.links[0].memory_bytes_per_s > 0,
        any_shares=workload.any_shares,
        to_owners=workload.in_shards,
    )
    leaves = workload.num_micro_batches
    return Prices(route.summed_by, network, num_leaves=leaves, across=route.across)


def storage_s(
    work: Workload, cluster: Cluster, world_size: int, step_s: float, factor: float = 1.0
) -> float:
    """What reading and decoding take longer than the step that they are prefetched for."""
    storage = cluster.storage
    if storage is None or not work.stored_bytes:
        return 0.0
    per_node = min(world_size, cluster.devices_per_node)
    images = work.global_batch_size / world_size * per_node
    taken_s = images * work.stored_bytes / storage.read_bytes_per_s
    if storage.decoded_images_per_s:
        taken_s = max(taken_s, images / storage.decoded_images_per_s)
    return max(0.0, factor * taken_s - step_s)


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
    return goodput(cost_s, cluster.restart_s, interval_s, between_s)


def _usd(cluster: Cluster, nodes: int, hours: float | None, kwh: float | None) -> float | None:
    """Nodes by the hour, and electricity if it is paid for apart."""
    prices = cluster.prices
    if hours is None or not (prices.node_usd_per_hour or prices.electricity_usd_per_kwh):
        return None
    return hours * nodes * prices.node_usd_per_hour + (kwh or 0) * prices.electricity_usd_per_kwh


def _kwh(cluster: Cluster, nodes: int, workers: int, hours: float | None) -> float | None:
    power_w = nodes * cluster.prices.power_w or workers * cluster.device.power_w
    return None if hours is None or not power_w else hours * power_w / 1000


def by_workers(rows: Sequence[Forecast]) -> Iterator[tuple[int, list[Forecast]]]:
    """Rows by number of workers, the fastest first."""
    for workers in sorted({row.workers for row in rows}):
        own = [row for row in rows if row.workers == workers]
        yield workers, sorted(own, key=lambda row: row.step_s)
