"""Prices the step of a network whose layers have layouts: computing and communication.

The workers that share a layer's batch sum its gradients during backward, by the training's
exchange. No worker computes while activations move between layers, because the next layer waits.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import groupby, pairwise
from math import ceil, sqrt

from firecaffe.exchange.schedule import BYTES_PER_ELEMENT
from firecaffe.gradients.buckets import cut
from firecaffe.parallel.volumes import sum_numbers
from firecaffe.planner.boundary_cost import Communication, Exchanges, boundary
from firecaffe.planner.chain import Unit
from firecaffe.planner.cluster import Cluster, on_cores
from firecaffe.planner.compute_time import (
    COPY_PASSES,
    HALF_PRECISION,
    correction,
    data_s,
    is_measured,
    layers_s,
    update_s,
)
from firecaffe.planner.forecast import forecast
from firecaffe.planner.layouts import LayerLayout, through
from firecaffe.planner.price import Prices, ranks_per_node
from firecaffe.planner.simulate import Network
from firecaffe.planner.step_cost import (
    ReadyBucket,
    overlap,
    prices_of,
    slowest_over_mean,
    storage_s,
)
from firecaffe.planner.update_price import UPDATES
from firecaffe.planner.worker_part import (
    Layouts,
    PartExchanges,
    is_apart,
    micro_batches_of,
    nodes_of,
    part_of,
    unevenness,
    unevenness_of_input,
    updated_bytes,
)
from firecaffe.planner.workload import Workload

ADDITION_PASSES = 3
"""Passes over memory of an addition in place: two reads and a write."""


@dataclass(frozen=True)
class SplitStep:
    """The parts of a step in seconds, and each worker's sent bytes."""

    compute_s: float
    stragglers_s: float
    """The part of compute_s that is the wait for slower workers at the end of the step."""
    data_s: float
    activations_s: float
    """Exchanges between layers, forward and backward, and waiting for slower workers there."""
    exposed_communication_s: float
    """Sums of gradients that backward does not hide."""
    update_s: float
    gradients_bytes: float
    activations_bytes: float

    @property
    def step_s(self) -> float:
        computes_s = self.compute_s + self.data_s + self.update_s
        return computes_s + self.activations_s + self.exposed_communication_s


@dataclass(frozen=True)
class _Tensor:
    model: int
    """Workers that hold one model; also the distance between ranks that hold the same part."""
    nodes: int
    ready_s: float
    num_bytes: int
    is_shared_out: bool


class SplitCost:
    """The cost of layouts for a workload on a number of workers; times are cached."""

    def __init__(
        self,
        work: Workload,
        cluster: Cluster,
        chain: Sequence[Unit],
        workers: int,
        exchange: str,
    ) -> None:
        cluster = on_cores(cluster, workers, work.threads)
        self.work, self.cluster, self.chain = work, cluster, chain
        self.workers, self.exchange = workers, exchange
        self.network = Network(cluster.links, workers)
        self.exchanges = Exchanges(self.network)
        self.update = UPDATES[work.update_at]
        self.itemsize = 2 if work.autocast in HALF_PRECISION else BYTES_PER_ELEMENT
        self._scale = correction(work, cluster.device, work.micro_batch_size)
        self.computes_s, self.prices = cache(self._computes_s), cache(self._prices)
        self.boundary = cache(partial(boundary, self.exchanges))

    def step(self, layouts: Layouts) -> SplitStep:
        """Price the step of these layouts. Raises: ValueError if they cannot use the exchange."""
        work, device = self.work, self.cluster.device
        placements = [*zip(self.chain, layouts, strict=True)]
        most = max(layout.batch for layout in layouts)
        rounds = min(micro_batches_of(work, layout) for layout in layouts)
        computed_s = sum(self.unit_s(*placement) for placement in placements)
        computed_s += sum(self.apart_s(*placement, most) for placement in placements)
        tensors, backward_s = self._last_backward(layouts)
        slowed_s, exposed_s = self._beside_backward(tensors, backward_s)
        passed = [self.between(at, *pair) for at, pair in enumerate(pairwise(layouts))]
        passed += [self.inside(*placement, most) for placement in placements]
        between = Communication.in_sequence(passed)
        updated = updated_bytes(work, self.chain, layouts)
        own_s = computed_s + slowed_s - backward_s
        row_waits_s = self.row_waits_s(layouts)
        # Workers that wait for each other at exchanges reach the end of the step together.
        apart = self.workers // self._row(layouts) if row_waits_s else self.workers
        late_s = own_s * (slowest_over_mean(apart, device.jitter, rounds) - 1)
        step = SplitStep(
            compute_s=own_s + late_s,
            stragglers_s=late_s,
            data_s=rounds * data_s(work, device),
            activations_s=between.seconds + row_waits_s,
            exposed_communication_s=exposed_s + self.network.agreement_s(self._row(layouts)),
            update_s=update_s(work, device, updated / max(1, work.parameter_bytes)),
            gradients_bytes=sum(
                sent_nodes(nodes_of(layout, most))
                * sum_numbers(layout.batch, weights_bytes(unit, layout))
                for unit, layout in placements
            ),
            activations_bytes=between.sent_bytes,
        )
        waits_s = storage_s(work, self.cluster, self.workers, step.step_s)
        return replace(step, data_s=step.data_s + waits_s)

    def row_waits_s(self, layouts: Layouts) -> float:
        """Seconds for which workers wait for the slowest of a row before they exchange activations.

        Times between two exchanges vary independently. Each has the share of a micro-batch's
        variance that it has of the micro-batch's time.
        """
        late = slowest_over_mean(self._row(layouts), self.cluster.device.jitter, 1) - 1
        rounds = min(micro_batches_of(self.work, layout) for layout in layouts)
        runs_s, run_s = list[float](), 0.0
        for seconds, ends in self._runs(layouts):
            run_s += seconds
            if ends:
                runs_s.append(run_s)
                run_s = 0.0
        whole_s = sum(runs_s) + run_s
        return rounds * late * sum(sqrt(seconds * whole_s) for seconds in runs_s)

    def _runs(self, layouts: Layouts) -> Iterator[tuple[float, bool]]:
        """Yield a micro-batch's seconds by unit, forward then back, and if workers meet then."""
        most = max(layout.batch for layout in layouts)
        meets = [
            [
                self.boundary(*pair, self.chain[at + 1].has_input_gradient).meets
                for pair in pairwise(through(*both))
            ]
            for at, both in enumerate(pairwise(layouts))
        ]
        times = [
            (ceil(most / layout.batch), *self.computes_s(unit, layout))
            for unit, layout in zip(self.chain, layouts, strict=True)
        ]
        forward = [*(any(there for there, _ in pairs) for pairs in meets), False]
        backward = [False, *(any(back for _, back in pairs) for pairs in meets)]
        for (count, forward_s, _), ends in zip(times, forward, strict=True):
            yield count * forward_s, ends
        for (count, _, backward_s), ends in zip(times[::-1], backward[::-1], strict=True):
            yield count * sum(backward_s), ends

    @staticmethod
    def _row(layouts: Layouts) -> int:
        """The largest number of workers that hold one model together."""
        return max(layout.model for layout in layouts)

    @cached_property
    def in_memory(self) -> int:
        """Workers of a host that sum in shared memory, for layers whose batch all workers share."""
        return ranks_per_node(self.network) if self.prices(1).across else 1

    @cached_property
    def alone_s(self) -> float:
        return forecast(self.work, self.cluster, 1, "tree").step_s

    def unit_s(self, unit: Unit, layout: LayerLayout) -> float:
        forward_s, backward_s = self.computes_s(unit, layout)
        return micro_batches_of(self.work, layout) * (forward_s + sum(backward_s))

    def _computes_s(self, unit: Unit, layout: LayerLayout) -> tuple[float, tuple[float, ...]]:
        """Seconds of a micro-batch's forward, and of backward by layer, the first layer first."""
        work, device = self.work, self.cluster.device
        # All paths of a worker count as one part.
        parts = part_of(unit, layout if unit.paths else layout.in_parts)
        scale = self._scale * layout.products
        return layers_s(parts, work, device, work.micro_batch_size, scale)

    def apart_s(self, unit: Unit, layout: LayerLayout, most: int) -> float:
        """Seconds to add, divide and check gradients that are kept apart. most: see `is_apart`."""
        if not is_apart(layout, most):
            return 0.0
        leaves, device = micro_batches_of(self.work, layout), self.cluster.device
        passes = ADDITION_PASSES * leaves
        if is_measured(self.work, device):  # measured micro-batches include copies into buckets
            passes -= COPY_PASSES * leaves
        return passes * weights_bytes(unit, layout) / device.memory_rate

    def inside(self, unit: Unit, layout: LayerLayout, most: int) -> Communication:
        """Price the exchanges within a unit. most: as in `is_apart`."""
        rounds = micro_batches_of(self.work, layout)
        samples = self.work.global_batch_size / layout.batch
        parts = PartExchanges(self.exchanges, rounds, samples, self.itemsize)
        prices = [
            self.halos(unit, layout),
            self.masks(unit, layout, most),
            parts.rows(unit, layout),
            parts.paths(unit, layout),
        ]
        return Communication.in_sequence(prices)

    def halos(self, unit: Unit, layout: LayerLayout) -> Communication:
        """Price the exchange of neighboring channels."""
        if not unit.halo or layout.groups == 1:
            return Communication()
        share = unit.halo / unit.group_elements / layout.batch
        traffics = 2 * [self.exchanges.halos((1, layout.groups), share)]
        num_bytes = self.itemsize * unit.inputs * self.work.global_batch_size
        return self.exchanges.price(traffics, num_bytes, micro_batches_of(self.work, layout))

    def masks(self, unit: Unit, layout: LayerLayout, most: int) -> Communication:
        """Price the exchange of parts of dropout masks."""
        if not unit.draws or layout.outputs == 1 or not is_apart(layout, most):
            return Communication()
        have = LayerLayout(layout.workers).makes
        traffic = self.exchanges.fetch(have, layout.makes)
        num_bytes = unit.outputs * self.work.global_batch_size
        rounds = self.rounds(LayerLayout(layout.workers), layout)
        return self.exchanges.price([traffic], num_bytes, rounds)

    def gradients_s(self, unit: Unit, layout: LayerLayout) -> float:
        numbers = weights_bytes(unit, layout) // BYTES_PER_ELEMENT
        return self.prices(layout.model).seconds([numbers])[0] if numbers else 0.0

    def _prices(self, model: int) -> Prices:
        """Prices among workers with the same parts, if all such sets exchange at once."""
        return prices_of(self.work, self.exchange, self.network.strided(model))

    def between(self, at: int, before: LayerLayout, after: LayerLayout) -> Communication:
        pairs = pairwise(through(before, after))
        return Communication.in_sequence(self._passed(at, *pair) for pair in pairs)

    def _passed(self, at: int, before: LayerLayout, after: LayerLayout) -> Communication:
        unit, follows = self.chain[at], self.chain[at + 1]
        num_bytes, rounds = self.size(at, before), self.rounds(before, after)
        num_bytes *= unevenness(unit, before) * unevenness_of_input(follows, after)
        at_boundary = self.boundary(before, after, follows.has_input_gradient)
        return self.exchanges.price(at_boundary.traffics, num_bytes, rounds)

    def size(self, at: int, before: LayerLayout) -> float:
        """Bytes of a batch between two units; partial sums are added before a pool shrinks them."""
        numbers = self.chain[at + 1].inputs
        if before.inputs > 1:
            numbers = max(numbers, self.chain[at].outputs)
        return self.itemsize * numbers * self.work.global_batch_size

    def rounds(self, before: LayerLayout, after: LayerLayout) -> int:
        """Exchanges in a step; each has one micro-batch of every worker that shares a batch."""
        return min(micro_batches_of(self.work, layout) for layout in (before, after))

    def _last_backward(self, layouts: Layouts) -> tuple[list[_Tensor], float]:
        most = max(layout.batch for layout in layouts)
        tensors, late, passed_s = [], [], 0.0
        for unit, layout in [*zip(self.chain, layouts, strict=True)][::-1]:
            _, backward_s = self.computes_s(unit, layout)
            in_round = ceil(most / layout.batch)
            for work, seconds in [*zip(part_of(unit, layout), backward_s, strict=True)][::-1]:
                passed_s += in_round * seconds
                apart = is_apart(layout, most)
                of_work = [
                    _Tensor(layout.model, nodes_of(layout, most), passed_s, size, not apart)
                    for size in work.parameters_bytes[::-1]
                ]
                if apart:
                    late += of_work
                else:
                    tensors += of_work
        return [*tensors, *(replace(tensor, ready_s=passed_s) for tensor in late)], passed_s

    def _beside_backward(
        self, tensors: Sequence[_Tensor], backward_s: float
    ) -> tuple[float, float]:
        """Seconds of the last backward, and of the exchange that remains after it."""
        sent: list[tuple[int, ReadyBucket, float, float]] = []
        kinds = groupby(tensors, lambda tensor: (tensor.model, tensor.nodes, tensor.is_shared_out))
        for (model, nodes, is_shared_out), run in kinds:
            same_kind = [*run]
            for start, stop in cut(
                [tensor.num_bytes for tensor in same_kind], self.work.bucket_bytes
            ):
                size = sum(tensor.num_bytes for tensor in same_kind[start:stop])
                bucket = ReadyBucket(same_kind[stop - 1].ready_s, size // BYTES_PER_ELEMENT)
                share = self.update.share_before if is_shared_out else 1.0
                sent.append((model, bucket, sent_nodes(nodes), share))
        by_model = defaultdict[int, list[int]](list)
        for model, bucket, _, _ in sent:
            by_model[model].append(bucket.num_elements)
        # Prices interpolate up to the largest size, so a model's buckets are priced together.
        once_s = {
            model: iter(self.prices(model).seconds(sizes)) for model, sizes in by_model.items()
        }
        whole_s = [more * next(once_s[model]) for model, _, more, _ in sent]
        taken_s = [seconds * row[-1] for seconds, row in zip(whole_s, sent, strict=True)]
        lanes = min((self.prices(model).lanes(self.cluster.lanes) for model in by_model), default=1)
        together = 1.0
        if len(sent) > 1:
            model, largest, *_ = max(sent, key=lambda row: row[1].num_elements)
            together = self.prices(model).share_in_lanes(largest.num_elements, lanes)
        buckets = [bucket for _, bucket, *_ in sent]
        slowdown = self.cluster.device.exchange_slowdown
        slowed_s, exposed_s = overlap(buckets, taken_s, backward_s, lanes, together, slowdown)
        return slowed_s, exposed_s + sum(whole_s) - sum(taken_s)


def sent_nodes(nodes: int) -> float:
    """A worker's sent bytes for a sum of `nodes` nodes, over those for one (`exchange.fold`)."""
    return (nodes + 1) / 2


def weights_bytes(unit: Unit, layout: LayerLayout) -> int:
    """Bytes of the gradients that each worker sums with others that hold the same part."""
    return sum(sum(work.parameters_bytes) for work in part_of(unit, layout))
