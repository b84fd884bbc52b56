"""The requirements of [parallel] on the other sections and on the workers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from firecaffe.errors import RecipeError
from firecaffe.exchange.leaves import num_nodes
from firecaffe.parallel.config import ONE_WEIRD_TRICK, ParallelConfig
from firecaffe.value_checks import count_of

T = TypeVar("T")


@dataclass(frozen=True)
class RankLayout:
    """Workers in rows and columns: rank d · model + k holds part or stage k of model d."""

    data: int
    model: int
    shares_samples: bool
    stages: int = 1  # if they are split, k counts the parts of one stage after the other

    @property
    def rows(self) -> list[range]:
        """The ranks that hold one model together."""
        return [range(d * self.model, (d + 1) * self.model) for d in range(self.data)]

    @property
    def columns(self) -> list[range]:
        """The ranks that hold the same parts, or the same stage."""
        return [range(k, self.data * self.model, self.model) for k in range(self.model)]

    @property
    def of_stages(self) -> list[range]:
        """The ranks that hold one stage of one model together."""
        size = self.model // self.stages
        return [range(start, start + size) for start in range(0, self.data * self.model, size)]

    @property
    def lines(self) -> list[range]:
        """The ranks that a micro-batch goes through: one of each stage of a model."""
        size = self.model // self.stages
        return [range(row.start + k, row.stop, size) for row in self.rows for k in range(size)]

    @property
    def planes(self) -> list[range]:
        """The lines of all models with the same part of each stage. Each plane sees all samples."""
        size = self.model // self.stages
        return [range(k, self.data * self.model, size) for k in range(size)]

    @property
    def at_a_time(self) -> int:
        """Micro-batches that a row computes at a time: one together, or one on each rank."""
        return 1 if self.shares_samples else self.model

    @property
    def sharers(self) -> int:
        """The number of rows, or ranks, that divide the micro-batches of a step."""
        return self.data * self.at_a_time

    @property
    def ranks_of_a_sharer(self) -> int:
        return self.model // self.at_a_time


def rows_of(of_ranks: Sequence[T], row_size: int) -> list[Sequence[T]]:
    return [of_ranks[start : start + row_size] for start in range(0, len(of_ranks), row_size)]


def layout_of(words: ParallelConfig, world_size: int) -> RankLayout:
    """Return the layout of so many workers. Raises: RecipeError if there is none."""
    size = words.row_size
    data = words.data or world_size // size
    if data * size != world_size:
        said = f"parallel.data {words.data} and " if words.data else ""
        of_workers = f" of {words.model} workers" if size > words.num_stages else ""
        said += (
            f"{words.num_stages} stages{of_workers}" if words.stages else f"parallel.model {size}"
        )
        needed = f"{words.data * size}" if words.data else f"a multiple of {size}"
        workers = count_of(world_size, "worker", "workers")
        raise RecipeError(f"{workers} with {said}: there must be {needed}")
    return RankLayout(data, size, words.shares_samples, words.num_stages)


@dataclass(frozen=True)
class Auto:
    num_leaves: int
    """The micro-batches of a step, or the replicas, which workers divide."""
    level: int = 0
    """The level of nodes that a codec encodes. Workers divide whole nodes."""
    schemes: Sequence[str] = ("none", ONE_WEIRD_TRICK)

    def layouts(
        self, words: ParallelConfig, world_size: int, is_dense: bool = True
    ) -> list[ParallelConfig]:
        """Return all layouts of so many workers. Raises: RecipeError if there is none."""
        layouts = []
        for model in (size for size in range(1, world_size + 1) if world_size % size == 0):
            if words.parts % model:
                continue
            data = world_size // model
            same = replace(words, data=data, model=model, scheme="none")
            if data <= num_nodes(self.num_leaves, self.level):
                layouts.append(same)
            # One weird trick needs that only fully connected layers are split (`is_dense`).
            is_possible = model > 1 and is_dense and ONE_WEIRD_TRICK in self.schemes
            if is_possible and self.num_leaves % (world_size << self.level) == 0:
                layouts.append(replace(same, scheme=ONE_WEIRD_TRICK))
        if not layouts:
            what = f"{self.num_leaves} micro-batches of a step (or replicas)"
            raise RecipeError(
                f"parallel.scheme auto: {world_size} workers cannot share {what} and {words.parts} "
                f"parts (parallel.parts) in any layout; take at most {self.num_leaves} workers, or "
                "a number that divides the parts"
            )
        return layouts
