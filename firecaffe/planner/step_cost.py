"""Prices a step: a workload with one exchange, on any number of workers of a cluster.

Gradients become ready during the last micro-batch's backward, from the last layer to the first, and
are sent in buckets in this order. The part of the exchange that outlasts backward is exposed: the
worker waits for it. An exchange may slow backward down, because messages use the processor. A step
ends with the slowest worker. If micro-batches vary by `jitter` (standard deviation over mean), P
workers wait for the largest of P sums, by Blom's normal order statistic (1958).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from math import ceil, inf, sqrt
from statistics import NormalDist

from firecaffe.exchange import AUTO
from firecaffe.exchange.route import SCHEDULE, Route, choose, find_route
from firecaffe.exchange.schedule import BYTES_PER_ELEMENT
from firecaffe.gradients.buckets import cut
from firecaffe.gradients.config import NO_COMPRESSOR
from firecaffe.planner.cluster import Cluster
from firecaffe.planner.compute_time import MicroBatch, data_s, micro_batch, update_s
from firecaffe.planner.price import Prices, coded_gradients_s, ranks_per_node
from firecaffe.planner.simulate import Network
from firecaffe.planner.update_price import ALL, update_of
from firecaffe.planner.workload import Workload


@dataclass(frozen=True)
class ReadyBucket:
    """A bucket: seconds from the last backward's start until it is ready, and float32 elements."""

    ready_s: float
    num_elements: int


@dataclass(frozen=True)
class Scales:
    """Factors for the figures of a cluster's file: times, and a device's jitter and slow-down."""

    compute: float = 1.0
    exchange: float = 1.0
    read: float = 1.0
    jitter: float = 1.0
    slowdown: float = 1.0


UNSCALED = Scales()


@dataclass(frozen=True)
class Step:
    compute_s: float
    """Forward and backward of this worker's micro-batches, and waiting for slower workers."""
    data_s: float
    exposed_communication_s: float
    update_s: float
    exchange_s: float
    """The exchange of all buckets, hidden or not."""
    slowed_s: float = 0.0
    """The part of compute_s by which exchanges slow backward down."""

    @property
    def step_s(self) -> float:
        return self.compute_s + self.data_s + self.exposed_communication_s + self.update_s


def buckets_of(workload: Workload, last: MicroBatch) -> list[ReadyBucket]:
    ready = list(accumulate(last.backward_s))
    ready_of_tensor = [
        ready[index]
        for index, layer in enumerate(reversed(workload.layers))
        for _ in layer.parameters_bytes
    ]
    sizes = workload.tensors_bytes
    return [
        ReadyBucket(ready_of_tensor[stop - 1], sum(sizes[start:stop]) // BYTES_PER_ELEMENT)
        for start, stop in cut(sizes, workload.bucket_bytes)
    ]


def overlap(
    buckets: Sequence[ReadyBucket],
    exchange_s: Sequence[float],
    backward_s: float,
    lanes: int = 1,
    share: float = 1.0,
    slowdown: float = 0.0,
) -> tuple[float, float]:
    """Seconds of backward during the exchange, and of the exchange that remains after it.

    lanes: most buckets in flight at once. share: their time together over their time in sequence.
    slowdown: the share by which backward takes longer while a bucket is in flight.
    """
    now_s = done_s = 0.0  # the clock; backward's progress, in undisturbed time
    waiting = deque(zip(buckets, exchange_s, strict=True))
    left_s: list[float] = []  # remaining time of each bucket in flight, if it were alone
    ended_s = 0.0
    while waiting or left_s or done_s < backward_s:
        goal_s = backward_s
        if waiting and len(left_s) < lanes:
            goal_s = min(waiting[0][0].ready_s, backward_s)
            if done_s >= goal_s:
                left_s.append(waiting.popleft()[1])
                continue
        stretch = 1 + slowdown if left_s else 1.0
        together = share if len(left_s) > 1 else 1.0
        computes_s = (goal_s - done_s) * stretch if done_s < backward_s else inf
        sends_s = min(left_s) * len(left_s) * together if left_s else inf
        passed_s = min(computes_s, sends_s)
        now_s += passed_s
        if left_s:
            # Finished buckets are removed by comparison: rounding could leave a remainder.
            sent_s = min(left_s) if passed_s == sends_s else passed_s / len(left_s) / together
            left_s = [s - sent_s for s in left_s if s > sent_s]
        if done_s < backward_s:
            done_s = goal_s if passed_s == computes_s else min(goal_s, done_s + passed_s / stretch)
            ended_s = now_s
    return ended_s, now_s - ended_s


def slowest_over_mean(world_size: int, jitter: float, micro_batches: float) -> float:
    """The expected time of the slowest worker over the mean. micro_batches: per worker and step."""
    if world_size == 1:
        return 1.0
    largest = NormalDist().inv_cdf((world_size - 0.375) / (world_size + 0.25))
    return 1 + jitter / sqrt(micro_batches) * largest


class StepCost:
    def __init__(
        self, workload: Workload, cluster: Cluster, exchange: str, compressor: str
    ) -> None:
        if compressor != NO_COMPRESSOR:  # then every worker updates all weights
            workload = replace(workload, update_at=ALL)
        self.workload, self.cluster = workload, cluster
        self.exchange, self.compressor = exchange, compressor
        self.one = micro_batch(workload, cluster.device, workload.micro_batch_size)
        self.buckets = buckets_of(workload, self.one)
        self.exchanges_s = cache(self._exchanges_s)
        self.share_in_lanes = cache(self._share_in_lanes)

    def step(self, world_size: int, by: Scales = UNSCALED) -> Step:
        device, work = self.cluster.device, self.workload
        share = ceil(work.num_micro_batches / world_size)
        taken_s = [by.exchange * seconds for seconds in self.exchanges_s(world_size)]
        backward_s = by.compute * sum(self.one.backward_s)
        ready = [ReadyBucket(by.compute * one.ready_s, one.num_elements) for one in self.buckets]
        lanes, lanes_share = self._lanes(world_size), self.share_in_lanes(world_size)
        slowdown = by.slowdown * device.exchange_slowdown
        beside_s, exposed_s = overlap(ready, taken_s, backward_s, lanes, lanes_share, slowdown)
        own_s = by.compute * share * self.one.compute_s + beside_s - backward_s
        update = update_of(work, world_size)
        gather_s = by.exchange * update.back_s(work, Network(self.cluster.links, world_size))
        updated = update.updated_bytes(work, world_size) / max(1, work.parameter_bytes)
        slowest = slowest_over_mean(world_size, by.jitter * device.jitter, share)
        step = Step(
            compute_s=own_s * slowest,
            data_s=by.compute * share * data_s(work, device),
            exposed_communication_s=exposed_s + gather_s,
            update_s=by.compute * update_s(work, device, updated),
            exchange_s=sum(taken_s) + gather_s,
            slowed_s=(beside_s - backward_s) * slowest,
        )
        waits_s = storage_s(work, self.cluster, world_size, step.step_s, by.read)
        return replace(step, data_s=step.data_s + waits_s)

    def _exchanges_s(self, world_size: int) -> list[float]:
        scale = self.workload.gradient_bytes / BYTES_PER_ELEMENT
        sizes = [round(scale * bucket.num_elements) for bucket in self.buckets]
        if world_size == 1:
            return [0.0] * len(sizes)
        if self.compressor != NO_COMPRESSOR:
            network, rate = Network(self.cluster.links, world_size), self.cluster.device.memory_rate
            return coded_gradients_s(self.compressor, self.workload, network, rate, sizes)
        update = update_of(self.workload, world_size)
        return update.sums_s(self.workload, self._prices(world_size), sizes)

    def in_memory(self, world_size: int) -> int:
        if world_size == 1 or self.compressor != NO_COMPRESSOR:
            return 1
        prices = self._prices(world_size)
        return ranks_per_node(prices.network) if prices.across else 1

    def _prices(self, world_size: int) -> Prices:
        network = Network(self.cluster.links, world_size)
        return prices_of(self.workload, self.exchange, network)

    def _lanes(self, world_size: int) -> int:
        if world_size == 1 or self.compressor != NO_COMPRESSOR:
            return 1
        return self._prices(world_size).lanes(self.cluster.lanes)

    def _share_in_lanes(self, world_size: int) -> float:
        lanes = self._lanes(world_size)
        if lanes == 1 or len(self.buckets) < 2:
            return 1.0
        size = max(bucket.num_elements for bucket in self.buckets)
        return self._prices(world_size).share_in_lanes(size, lanes)


def route_of(workload: Workload, exchange: str, network: Network) -> Route:
    """Find a training's route, perhaps that of another exchange. Raises: ValueError if none."""
    return find_route(
        exchange,
        workload.num_micro_batches,
        network.world_size,
        ranks_per_node(network),
        shared_memory=workload.shared_memory and network.links[0].memory_bytes_per_s > 0,
        any_shares=workload.any_shares,
        to_owners=update_of(workload, network.world_size).to_owners,
    )


def prices_of(workload: Workload, exchange: str, network: Network) -> Prices:
    route = route_of(workload, exchange, network)
    leaves = workload.num_micro_batches
    return Prices(route.summed_by, network, num_leaves=leaves, across=route.across)


def storage_s(
    work: Workload, cluster: Cluster, world_size: int, step_s: float, factor: float = 1.0
) -> float:
    """Seconds by which reading and decoding exceed the step during which they are prefetched."""
    storage = cluster.storage
    if storage is None or not work.stored_bytes:
        return 0.0
    per_node = min(world_size, cluster.devices_per_node)
    images = work.global_batch_size / world_size * per_node
    taken_s = images * work.stored_bytes / storage.read_bytes_per_s
    if storage.decoded_images_per_s:
        taken_s = max(taken_s, images / storage.decoded_images_per_s)
    return max(0.0, factor * taken_s - step_s)


def recipe_exchange(workload: Workload, cluster: Cluster, world_size: int) -> str:
    """Return the recipe's exchange, for `auto` the chosen one, or "" if there is no recipe."""
    if workload.exchange != AUTO:
        return workload.exchange
    network = Network(cluster.links, world_size)
    tree = route_of(workload, "tree", network)
    if tree.way != SCHEDULE or tree.senders == 1:  # there is no choice
        return "tree"
    sizes = workload.tensors_bytes
    buckets = [sum(sizes[start:stop]) for start, stop in cut(sizes, workload.bucket_bytes)]
    outer = network.outermost
    return choose(
        world_size, buckets, outer.latency_s, outer.bandwidth_bytes_per_s, tree.senders
    ).algorithm
