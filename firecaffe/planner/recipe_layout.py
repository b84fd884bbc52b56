"""Prices and forecasts a recipe's layout: its split layers, or its stages."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from firecaffe.errors import RecipeError
from firecaffe.models import ModelConfig
from firecaffe.parallel.config import AUTO, ParallelConfig
from firecaffe.parallel.find_paths import PATHS
from firecaffe.planner.chain import Unit, chain_of
from firecaffe.planner.cluster import Cluster, slower
from firecaffe.planner.forecast import check_plan, errors_of
from firecaffe.planner.layouts import layouts_of_recipe
from firecaffe.planner.recipe_stages import (
    Crossing,
    StageWork,
    crossings_of,
    split_stages,
    stages_step,
    whole_stages,
)
from firecaffe.planner.split_plans import SplitPlan, plan_of_step
from firecaffe.planner.split_step import SplitCost, SplitStep
from firecaffe.planner.worker_part import cut_where_gathered, memory_of
from firecaffe.planner.workload import Workload
from firecaffe.recipe.sections import Recipe
from firecaffe.recipe.worker_numbers import Auto, auto_of, layout_of

RECIPE = "recipe"


@dataclass(frozen=True)
class RecipeLayout:
    words: ParallelConfig
    chosen: Mapping[str, str]
    """The split layers, each with its word; empty with stages."""
    auto: Auto | None = None
    """The choices of `auto`; None: all."""

    @classmethod
    def of(cls, recipe: Recipe, chosen: Mapping[str, str]) -> Self:
        return cls(recipe.parallel, chosen, auto_of(recipe))

    def fits(self, workers: int) -> bool:
        size = self.words.row_size
        data = self.words.data or workers // size
        return data * size == workers


@dataclass(frozen=True)
class LayoutCost(ABC):
    """Prices a recipe's layout, on any number of workers that can have it."""

    work: Workload
    layout: RecipeLayout
    chain: tuple[Unit, ...]

    @abstractmethod
    def plans(self, cluster: Cluster, workers: int, exchange: str) -> list[SplitPlan]:
        """Price the layout; for `auto` all choices: those that fit in memory first, then by step.

        Raises: RecipeError if none is possible or priced, or rows of workers lie across nodes.
        """


def layout_cost(config: ModelConfig, work: Workload, layout: RecipeLayout) -> LayoutCost:
    """Choose how to price a layout. Raises: RecipeError if it is impossible; as `chain_of`."""
    parallel = layout.words
    crossings = tuple(crossings_of(config, work, parallel.stages)) if parallel.stages else ()
    if not layout.chosen:
        return _Stages(work, layout, (), crossings)
    paths = [name for name, word in layout.chosen.items() if word == PATHS]
    chain = chain_of(config, work, paths)
    chain = cut_where_gathered(chain, layout.chosen, parallel.num_parts)
    if crossings:
        # Parts of weights need not be whole rows, so each part has one owner.
        return _SplitStages(replace(work, has_whole_shards=True), layout, chain, crossings)
    return (_Auto if parallel.scheme == AUTO else _Split)(work, layout, chain)


@dataclass(frozen=True)
class _Stages(LayoutCost):
    crossings: tuple[Crossing, ...]

    def plans(self, cluster: Cluster, workers: int, exchange: str) -> list[SplitPlan]:
        cost, parallel = SplitCost(self.work, cluster, (), workers, exchange), self.layout.words
        with _named(workers):
            stages = self.stages(cost)
            model = parallel.row_size // parallel.num_stages
            pipelined = stages_step(cost, self.crossings, stages, parallel.pipeline, model)
        plan = plan_of_step(RECIPE, cost, pipelined.step, pipelined.memory, parallel.row_size)
        plan = replace(plan, idle=pipelined.idle, stages_s=pipelined.computes_s)
        return [replace(plan, words=parallel, crossings=self.crossings)]

    def stages(self, cost: SplitCost) -> list[StageWork]:
        return whole_stages(self.work, cost.cluster.device, self.layout.words.stages)


class _SplitStages(_Stages):
    """Stages with split layers; the workers of a stage have neighboring ranks."""

    def stages(self, cost: SplitCost) -> list[StageWork]:
        names, unstaged = self.layout.words.stages, replace(self.layout.words, stages=[])
        workers = cost.workers // layout_of(self.layout.words, cost.workers).stages
        of_stage = SplitCost(self.work, cost.cluster, self.chain, workers, cost.exchange)
        layouts = layouts_of_recipe(self.chain, unstaged, self.layout.chosen, workers)
        return split_stages(of_stage, layouts, names)


class _Split(LayoutCost):
    def plans(self, cluster: Cluster, workers: int, exchange: str) -> list[SplitPlan]:
        return [self.plan(self.layout.words, cluster, workers, exchange)]

    def plan(
        self, words: ParallelConfig, cluster: Cluster, workers: int, exchange: str
    ) -> SplitPlan:
        cost = SplitCost(self.work, cluster, self.chain, workers, exchange)
        with _named(workers):
            layouts = layouts_of_recipe(self.chain, words, self.layout.chosen, workers)
            step = cost.step(layouts)
            memory = memory_of(self.work, self.chain, layouts, cost.in_memory)
        plan = plan_of_step(RECIPE, cost, step, memory, words.row_size)
        return replace(plan, layouts=tuple(layouts), words=words)


class _Auto(_Split):
    def plans(self, cluster: Cluster, workers: int, exchange: str) -> list[SplitPlan]:
        split = [unit for unit in self.chain if unit.name in self.layout.chosen]
        is_dense = all(unit.is_dense for unit in split)
        auto = self.layout.auto or Auto(self.work.num_micro_batches, self.work.compressor_level)
        names = auto.layouts(self.layout.words, workers, is_dense)
        priced = [self.plan(name, cluster, workers, exchange) for name in names]
        return sorted(priced, key=lambda plan: (not plan.fits, plan.step.step_s))


@contextmanager
def _named(workers: int) -> Iterator[None]:
    """Turn a ValueError of the block into a RecipeError that names the workers."""
    try:
        yield
    except ValueError as error:
        raise RecipeError(f"parallel on {workers} workers: {error}") from error


def forecast_parallel(
    config: ModelConfig,
    work: Workload,
    cluster: Cluster,
    layout: RecipeLayout,
    workers: int,
    exchange: str,
) -> dict[str, Any]:
    """Forecast a run with its band, for its folder. Raises: RecipeError if it cannot be priced."""
    check_plan(work, cluster, workers, layout.words.row_size)
    cost = layout_cost(config, work, layout)
    (plan,) = cost.plans(cluster, workers, exchange)
    compute, link = errors_of(work, cluster, workers)
    low, high = (
        cost.plans(slower(cluster, 1 + sign * compute, 1 + sign * link), workers, exchange)[0].step
        for sign in (-1, 1)
    )
    parallel = layout.words
    return {
        "parallel": asdict(parallel)
        | {"data": workers // parallel.row_size, "model": parallel.row_size},
        "workers": workers,
        "exchange": exchange,
        **_parts(plan.step),
        "low": _parts(low),
        "high": _parts(high),
        "step_low_s": low.step_s,
        "step_high_s": high.step_s,
        "idle": plan.idle,
        "stages_s": plan.stages_s,
        "images_per_s": plan.images_per_s,
        "speedup": plan.speedup,
        "memory_bytes": plan.memory,
        "fits": plan.fits,
    }


def _parts(step: SplitStep) -> dict[str, float]:
    return asdict(step) | {"step_s": step.step_s}
