"""The ways to share a network among workers, each with its step, its memory and what it sends."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from firecaffe.exchange import ALGORITHMS
from firecaffe.parallel.config import ParallelConfig
from firecaffe.plan.chain import Unit
from firecaffe.plan.cluster import Cluster
from firecaffe.plan.forecast import Forecast
from firecaffe.plan.held import memory_of, widest
from firecaffe.plan.layouts import Layout, allows
from firecaffe.plan.recipe_stages import Crossing
from firecaffe.plan.search_split import best_layouts
from firecaffe.plan.split_step import SplitCost, SplitStep
from firecaffe.plan.stages import best_stages
from firecaffe.plan.workload import Workload

Layouts = list[Layout]


@dataclass(frozen=True)
class SplitPlan:
    """One way, on so many workers."""

    name: str
    """A row of `WAYS`, or of a recipe's own."""
    workers: int
    exchange: str
    """Of the gradients."""
    model: int
    """Workers that hold one model; 1 if layers differ."""
    step: SplitStep
    images_per_s: float
    speedup: float
    """Over one worker."""
    memory: dict[str, float]
    """Bytes of the worker that holds most, by what they are for."""
    fits: bool
    widest: float
    """How many times as wide all layers may be, as of `plan.held.widest`."""
    layouts: tuple[Layout, ...] = ()
    """One for each unit; none of a pipeline."""
    cuts: tuple[int, ...] = ()
    """The units that stages begin with, and their number; of a pipeline."""
    idle: float = 0.0
    """The share of turns in which a stage waits."""
    words: ParallelConfig | None = None
    """Of a recipe's own way."""
    crossings: tuple[Crossing, ...] = ()
    """What goes from stage to stage, of a recipe's."""

    @property
    def memory_bytes(self) -> float:
        """All of it."""
        return sum(self.memory.values())


def exchange_for(rows: Sequence[Forecast], workers: int) -> str:
    """The fastest exchange that was planned, of those among any ranks; a tree if none was."""
    own = [row for row in rows if row.workers == workers and row.exchange in ALGORITHMS]
    return min(own, key=lambda row: row.step_s).exchange if own else "tree"


def split_plans(
    work: Workload,
    cluster: Cluster,
    chain: Sequence[Unit],
    workers: int,
    exchange: str,
    ways: Sequence[str],
) -> list[SplitPlan]:
    """Each way's fastest that fits, or else its fastest, in the order of `WAYS`; a way that cannot
    be is left out.
    """
    cost = SplitCost(work, cluster, chain, workers, exchange)
    found = []
    for name in (each for each in WAYS if each in ways):
        plans = [*WAYS[name](cost)]
        if plans:
            found.append(min(plans, key=lambda each: (not each.fits, each.step.step_s)))
    return found


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
        found = best_stages(cost, stages)
        plan = plan_of_step("pipeline", cost, found.step, found.memory, stages)
        yield SplitPlan(**{**plan.__dict__, "cuts": found.cuts, "idle": found.idle})


WAYS: dict[str, Callable[[SplitCost], Iterator[SplitPlan]]] = {
    "data": _data,
    "same_samples": _same_samples,
    "one_weird_trick": _one_weird_trick,
    "layers": _layers,
    "pipeline": _pipeline,
}
"""Names for `--ways`."""


def data_layouts(cost: SplitCost) -> Layouts:
    """Every layer by its samples."""
    return [Layout(cost.workers)] * len(cost.chain)


def dense_layouts(cost: SplitCost, is_trick: bool) -> Iterator[tuple[int, Layouts]]:
    """Fully connected layers shared by rows of workers, by neurons and by inputs in turn; with the
    number of workers of a row.

    is_trick: all other layers are shared by samples among all workers (Krizhevsky 2014), who must
    divide the micro-batches; else each row computes them as if it were one worker.
    """
    if is_trick and cost.work.num_micro_batches % cost.workers:
        return
    for model in _models(cost):
        batch = cost.workers // model
        whole = Layout(cost.workers) if is_trick else Layout(batch, copies=model)
        words = Layout(batch, outputs=model), Layout(batch, inputs=model)
        for begins in (0, 1):
            layouts, turn = [], begins
            for unit in cost.chain:
                split = words[turn % 2]
                is_split = unit.is_dense and allows(unit, split)
                layouts.append(split if is_split else whole)
                turn = turn + 1 if is_split else begins
            if any(each.parts > 1 for each in layouts):
                yield model, layouts


def _models(cost: SplitCost) -> Iterator[int]:
    """Numbers of workers that may hold one model."""
    for model in range(2, cost.workers + 1):
        if cost.workers % model == 0:
            try:
                cost.prices(model)
            except ValueError:  # such rows neither fill nodes nor divide them
                continue
            yield model


def _plan(name: str, cost: SplitCost, layouts: Layouts, model: int) -> SplitPlan:
    memory = memory_of(cost.work, cost.chain, layouts, cost.in_memory)
    plan = plan_of_step(name, cost, cost.step(layouts), memory, model)
    return SplitPlan(**{**plan.__dict__, "layouts": tuple(layouts)})


def plan_of_step(
    name: str, cost: SplitCost, step: SplitStep, memory: dict[str, float], model: int
) -> SplitPlan:
    """A way with what it comes to. model: workers that hold one model."""
    device_bytes = cost.cluster.device.memory_bytes
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
