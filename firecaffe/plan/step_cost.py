"""What a step takes: a workload by one exchange, on any number of workers of a cluster."""

from dataclasses import replace
from math import ceil

from firecaffe.exchange.route import Route, find_route
from firecaffe.gradients.config import NO_COMPRESSOR
from firecaffe.plan.cluster import Cluster
from firecaffe.plan.codec import coded_s
from firecaffe.plan.compute import data_s, micro_batch, update_s
from firecaffe.plan.network import Network
from firecaffe.plan.price import Prices, ranks_per_node
from firecaffe.plan.timeline import Bucket, Step, buckets_of, overlap, slowest_of
from firecaffe.plan.update import ALL, update_of
from firecaffe.plan.workload import Workload


class StepCost:
    """The step of one workload by one exchange, for any number of workers."""

    def __init__(
        self, workload: Workload, cluster: Cluster, exchange: str, compressor: str
    ) -> None:
        if compressor != NO_COMPRESSOR:  # with which all update all
            workload = replace(workload, update_at=ALL)
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
        update = update_of(work, world_size)
        gather_s = exchange * update.back_s(work, Network(self.cluster.links, world_size))
        updated = update.updated_bytes(work, world_size) / max(1, work.parameter_bytes)
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
            else:
                update = update_of(self.workload, world_size)
                taken_s = update.sums_s(self.workload, self._prices(network), sizes)
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


def route_of(workload: Workload, exchange: str, network: Network) -> Route:
    """The route that a training would take: at some numbers of workers another exchange stands in.

    Raises: ValueError if there is no such exchange among so many workers.
    """
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
    """Those of what a training would take. Raises: ValueError, as `route_of`."""
    route = route_of(workload, exchange, network)
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
