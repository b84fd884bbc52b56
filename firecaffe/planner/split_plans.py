"""Plans the ways to share a network among workers, with their step, memory and volumes.

The cheapest layouts of a chain are found by dynamic programming. A unit's cost depends on its
layout, and an exchange's cost on the layouts of both neighbors, so the cheapest way to a layout
extends a cheapest way to a layout of the previous unit. How much of the gradients' sums backward
hides is no such cost. So several exposed shares are tried (EXPOSED), and the shortest step wins.

Source: Jia et al. 2018 (Exploring Hidden Dimensions in Parallelizing CNNs), the case of a chain. A
plan explains each layer's layout by numbers: bytes of weights against bytes of activations.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from firecaffe.exchange import ALGORITHMS
from firecaffe.exchange.route import FOLD
from firecaffe.exchange.schedule import BYTES_PER_ELEMENT
from firecaffe.gradients.config import NO_COMPRESSOR
from firecaffe.parallel.config import ParallelConfig
from firecaffe.parallel.volumes import sum_numbers
from firecaffe.planner.boundary_cost import Boundary, Communication
from firecaffe.planner.chain import Unit
from firecaffe.planner.cluster import Cluster
from firecaffe.planner.forecast import Forecast
from firecaffe.planner.layouts import LayerLayout, allows, layouts_of, words_of
from firecaffe.planner.memory import on_device
from firecaffe.planner.price import SHARDED, SIZES, rounds_only_s
from firecaffe.planner.recipe_stages import Crossing
from firecaffe.planner.split_step import SplitCost, SplitStep, sent_nodes, weights_bytes
from firecaffe.planner.stage_times import best_stages
from firecaffe.planner.worker_part import Layouts, memory_of, micro_batches_of, nodes_of, widest
from firecaffe.planner.workload import Workload

Array = NDArray[np.float64]

EXPOSED = (1.0, 0.75, 0.5, 0.25)
"""Assumed shares of the time of gradients' sums that backward does not hide."""

MAX_TRAFFICS = 4


def best_layouts(cost: SplitCost, first: Sequence[Sequence[LayerLayout]] = ()) -> list[LayerLayout]:
    """Find the layouts of the shortest step. first: further candidates."""
    layouts = possible(cost)
    computes, gradients = costs_by_layout(cost, layouts)
    between = boundary_costs(cost, layouts)
    candidates = [list(given) for given in first]
    for exposed in EXPOSED:
        unit_costs = [a + exposed * b for a, b in zip(computes, gradients, strict=True)]
        chosen = [layouts[index] for index in cheapest(unit_costs, between)[1]]
        if chosen not in candidates:
            candidates.append(chosen)
    return min(candidates, key=lambda candidate: cost.step(candidate).step_s)


def cheapest(own: Sequence[Array], between: Sequence[Array]) -> tuple[float, list[int]]:
    """Find the least sum of costs, and the choice for each unit.

    own: for each unit the cost of each choice, shape (choices,); infinite if it is impossible.
    between: for each unit but the last, shape (choices, choices of the next unit).
    """
    total, ways = own[0], []
    for costs, after in zip(between, own[1:], strict=True):
        through = total[:, None] + costs
        ways.append(through.argmin(0))
        total = through.min(0) + after
    chosen = [int(total.argmin())]
    for way in reversed(ways):
        chosen.append(int(way[chosen[-1]]))
    return float(total.min()), chosen[::-1]


def possible(cost: SplitCost) -> list[LayerLayout]:
    """List layouts that fit some unit, and whose rows of workers fill or divide groups of links."""
    layouts = []
    for layout in layouts_of(cost.workers, cost.work.num_micro_batches):
        try:
            cost.prices(layout.model)
        except ValueError:
            continue
        if any(allows(unit, layout) for unit in cost.chain):
            layouts.append(layout)
    return layouts


def costs_by_layout(
    cost: SplitCost, layouts: Sequence[LayerLayout]
) -> tuple[list[Array], list[Array]]:
    """Seconds to compute each unit, and to sum its gradients, by layout; infinite if impossible.

    `is_apart` is evaluated as if all workers shared some layer's batch.
    """
    shape, most = (len(cost.chain), len(layouts)), cost.workers
    computes, numbers = np.full(shape, np.inf), np.zeros(shape)
    apart = np.zeros(shape)
    for row, unit in enumerate(cost.chain):
        for column, layout in enumerate(layouts):
            if allows(unit, layout):
                computes[row, column] = cost.unit_s(unit, layout) + cost.halos(unit, layout).seconds
                sent = weights_bytes(unit, layout) * sent_nodes(nodes_of(layout, most))
                numbers[row, column] = sent / BYTES_PER_ELEMENT
                apart[row, column] = cost.apart_s(unit, layout, most)
    gradients = np.zeros(shape)
    for column, layout in enumerate(layouts):
        start_s, slope_s = _line(cost, layout.model)
        gradients[:, column] = np.where(
            numbers[:, column] > 0, start_s + slope_s * numbers[:, column], 0.0
        )
    return [*computes], [*(gradients + apart)]


def _line(cost: SplitCost, model: int) -> tuple[float, float]:
    prices = cost.prices(model)
    if prices.network.world_size == 1:
        return 0.0, 0.0
    # `fold` sends its nodes as the sharded server does.
    name = SHARDED if prices.algorithm == FOLD else prices.algorithm
    few, many = (rounds_only_s(name, prices.network, size) for size in SIZES)
    slope_s = (many - few) / (SIZES[1] - SIZES[0])
    return max(0.0, few - slope_s * SIZES[0]), slope_s


def boundary_costs(cost: SplitCost, layouts: Sequence[LayerLayout]) -> list[Array]:
    """Seconds between each unit and the next one, shape (layouts, layouts of the next)."""
    tables: dict[bool, tuple[Array, Array, Array]] = {}
    shares = np.array([micro_batches_of(cost.work, layout) for layout in layouts])
    rounds = np.minimum(shares[:, None], shares)[..., None]
    seconds = []
    for at, unit in enumerate(cost.chain[1:]):
        if unit.has_input_gradient not in tables:
            tables[unit.has_input_gradient] = _table(cost, layouts, unit.has_input_gradient)
        sizes = np.array([cost.size(at, layout) for layout in layouts])[:, None, None]
        table = tables[unit.has_input_gradient]
        seconds.append(cost.exchanges.seconds_of(*table, sizes, rounds).sum(-1))
    return seconds


def _table(
    cost: SplitCost, layouts: Sequence[LayerLayout], has_gradient: bool
) -> tuple[Array, Array, Array]:
    """Traffics of layouts: shapes (before, after, traffics, links) twice, then without links."""
    n, links = len(layouts), len(cost.network.links)
    table = [np.zeros((n, n, MAX_TRAFFICS, *rest)) for rest in ((links,), (links,), ())]
    for i, before in enumerate(layouts):
        for j, after in enumerate(layouts):
            at_boundary: Boundary = cost.boundary(before, after, has_gradient)
            for k, traffic in enumerate(at_boundary.traffics):
                table[0][i, j, k], table[1][i, j, k] = traffic.messages, traffic.share
                table[2][i, j, k] = traffic.added
    return table[0], table[1], table[2]


@dataclass(frozen=True)
class SplitPlan:
    name: str
    """A key of `WAYS`, or `recipe`."""
    workers: int
    exchange: str
    model: int
    """Workers that hold one model; 1 if layers differ."""
    step: SplitStep
    images_per_s: float
    speedup: float
    memory: dict[str, float]
    fits: bool
    widest: float
    layouts: tuple[LayerLayout, ...] = ()
    """One for each unit; none for stages."""
    cuts: tuple[int, ...] = ()
    """Units at which a pipeline's stages begin, and the number of units."""
    idle: float = 0.0
    """The share of turns in which a stage waits."""
    stages_s: tuple[float, ...] = ()
    """Seconds of a step in which each stage computes; none without stages of a recipe."""
    words: ParallelConfig | None = None
    crossings: tuple[Crossing, ...] = ()

    @property
    def memory_bytes(self) -> float:
        return sum(self.memory.values())


def exchange_for(rows: Sequence[Forecast], workers: int) -> str:
    """Return the fastest planned exchange that works among any ranks; tree if none was planned.

    Rows with a codec do not count: they name the tree, but are as fast as their codec.
    """
    planned = [
        row
        for row in rows
        if row.workers == workers and row.exchange in ALGORITHMS and row.compressor == NO_COMPRESSOR
    ]
    return min(planned, key=lambda row: row.step_s).exchange if planned else "tree"


def split_plans(
    work: Workload,
    cluster: Cluster,
    chain: Sequence[Unit],
    workers: int,
    exchange: str,
    ways: Sequence[str],
) -> list[SplitPlan]:
    """Return each way's fastest plan, preferring plans that fit in memory; omit impossible ways."""
    cost = SplitCost(work, cluster, chain, workers, exchange)
    fastest = []
    for name in (way for way in WAYS if way in ways):
        plans = [*WAYS[name](cost)]
        if plans:
            fastest.append(min(plans, key=lambda plan: (not plan.fits, plan.step.step_s)))
    return fastest


def _data(cost: SplitCost) -> Iterator[SplitPlan]:
    yield _plan("data", cost, data_layouts(cost), 1)


def _same_samples(cost: SplitCost) -> Iterator[SplitPlan]:
    for model, layouts in dense_layouts(cost, is_trick=False):
        yield _plan("same_samples", cost, layouts, model)


def _one_weird_trick(cost: SplitCost) -> Iterator[SplitPlan]:
    for model, layouts in dense_layouts(cost, is_trick=True):
        yield _plan("one_weird_trick", cost, layouts, model)


def _layers(cost: SplitCost) -> Iterator[SplitPlan]:
    named = [layouts for is_trick in (True, False) for _, layouts in dense_layouts(cost, is_trick)]
    yield _plan("layers", cost, best_layouts(cost, [data_layouts(cost), *named]), 1)


def _pipeline(cost: SplitCost) -> Iterator[SplitPlan]:
    for stages in _models(cost):
        if stages > len(cost.chain) - 1:
            continue
        best = best_stages(cost, stages)
        plan = plan_of_step("pipeline", cost, best.step, best.memory, stages)
        yield replace(plan, cuts=best.cuts, idle=best.idle)


WAYS: dict[str, Callable[[SplitCost], Iterator[SplitPlan]]] = {
    "data": _data,
    "same_samples": _same_samples,
    "one_weird_trick": _one_weird_trick,
    "layers": _layers,
    "pipeline": _pipeline,
}


def data_layouts(cost: SplitCost) -> list[LayerLayout]:
    return [LayerLayout(cost.workers)] * len(cost.chain)


def dense_layouts(cost: SplitCost, is_trick: bool) -> Iterator[tuple[int, list[LayerLayout]]]:
    """Yield (workers of a row, layouts): dense layers split by neurons and by inputs in turn.

    is_trick: all workers share the samples of other layers (Krizhevsky 2014); else all workers of
    a row compute the same samples.
    """
    if is_trick and cost.work.num_micro_batches % cost.workers:
        return
    for model in _models(cost):
        batch = cost.workers // model
        whole = LayerLayout(cost.workers) if is_trick else LayerLayout(batch, copies=model)
        splits = LayerLayout(batch, outputs=model), LayerLayout(batch, inputs=model)
        for begins in (0, 1):
            layouts, turn = [], begins
            for unit in cost.chain:
                split = splits[turn % 2]
                is_split = unit.is_dense and allows(unit, split)
                layouts.append(split if is_split else whole)
                turn = turn + 1 if is_split else begins
            if any(layout.parts > 1 for layout in layouts):
                yield model, layouts


def _models(cost: SplitCost) -> Iterator[int]:
    for model in range(2, cost.workers + 1):
        if cost.workers % model == 0:
            try:
                cost.prices(model)
            except ValueError:  # such rows neither fill nor divide nodes
                continue
            yield model


def _plan(name: str, cost: SplitCost, layouts: Layouts, model: int) -> SplitPlan:
    memory = memory_of(cost.work, cost.chain, layouts, cost.in_memory)
    plan = plan_of_step(name, cost, cost.step(layouts), memory, model)
    return replace(plan, layouts=tuple(layouts))


def plan_of_step(
    name: str, cost: SplitCost, step: SplitStep, memory: dict[str, float], model: int
) -> SplitPlan:
    device_bytes = cost.cluster.device.memory_bytes
    memory = on_device(memory, cost.cluster.device)
    return SplitPlan(
        name,
        cost.workers,
        cost.exchange,
        model,
        step,
        cost.work.global_batch_size / step.step_s,
        cost.alone_s / step.step_s,
        memory,
        sum(memory.values()) <= device_bytes,
        widest(memory, device_bytes),
    )


@dataclass(frozen=True)
class Reason:
    """A layer's cost if all workers shared its batch, and its cost in the plan."""

    name: str
    words: str
    weights_bytes: int
    """Bytes of its gradients, |W|."""
    data_bytes: float
    """Bytes of its input and output for the whole batch, |D|."""
    by_data_bytes: float
    """Bytes that each worker would send in a step, if all shared the batch."""
    by_data_s: float
    sent_bytes: float
    """Bytes that each worker sends of its gradients, and between it and the layer before."""
    sent_s: float


def reasons(plan: SplitPlan, cost: SplitCost) -> list[Reason]:
    by_data = LayerLayout(cost.workers)
    pairs = [*enumerate(pairwise(plan.layouts))]
    between = [Communication(), *(cost.between(at, *pair) for at, pair in pairs)]
    by_layer = []
    rows = zip(cost.chain, plan.layouts, between, strict=True)
    for unit, layout, before in rows:
        if not unit.weights:
            continue
        if layout.rows * layout.paths > 1:  # the unit itself sums gradients of weights or inputs
            before = Communication.in_sequence([before, cost.inside(unit, layout, layout.batch)])
        whole = BYTES_PER_ELEMENT * unit.weights
        numbers = unit.inputs + unit.outputs
        by_layer.append(
            Reason(
                unit.name,
                words_of(unit, layout),
                whole,
                cost.itemsize * numbers * cost.work.global_batch_size,
                sum_numbers(cost.workers, whole),
                cost.gradients_s(unit, by_data),
                sum_numbers(layout.batch, weights_bytes(unit, layout)) + before.sent_bytes,
                cost.gradients_s(unit, layout) + before.seconds,
            )
        )
    return by_layer
