"""The requirements of a recipe and its layout on the number of ranks, and on hosts that leave."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from firecaffe.errors import RecipeError
from firecaffe.exchange import AUTO as AUTO_EXCHANGE
from firecaffe.exchange import NATIVE, find_schedule
from firecaffe.exchange.leaves import num_nodes
from firecaffe.parallel.config import AUTO, ONE_WEIRD_TRICK, ParallelConfig
from firecaffe.recipe.fits import SIZES, Fit, raise_first
from firecaffe.recipe.refusals import OF_RANKS, check_together, is_refused
from firecaffe.recipe.sections import Recipe
from firecaffe.synchrony.config import LOCAL, SynchronyConfig, learner_count_problem
from firecaffe.value_checks import count_of

T = TypeVar("T")


@dataclass(frozen=True)
class RankLayout:
    """Workers in rows and columns: rank d · model + k holds part or stage k of model d."""

    data: int
    model: int
    shares_samples: bool
    stages: int = 1  # if stages are split, k counts the parts of stage 0, then of stage 1, …

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


@dataclass(frozen=True)
class Workers:
    world_size: int
    per_host: int
    layout: RankLayout


def _equal_samples(recipe: Recipe, workers: Workers) -> str:
    """With one weird trick, workers have equal numbers of micro-batches, or of encoded sums."""
    layout, level = workers.layout, recipe.exchange.level
    leaves, sharers = recipe.train.num_micro_batches, layout.sharers
    if layout.shares_samples:
        return ""
    said = (
        f"parallel.scheme one_weird_trick with {count_of(leaves, 'micro-batch', 'micro-batches')} "
        f"a step on {sharers} workers"
    )
    if sharers > 1 and level and leaves % (sharers << level):
        return (
            f"{said}, of which {1 << level} are encoded together (exchange.compressor_level "
            f"{level}): each worker must have equally many of these"
        )
    if leaves % sharers:
        return f"{said}: they exchange one each at a time, so they must divide them"
    return ""


def _enough_micro_batches(recipe: Recipe, workers: Workers) -> str:
    """Each worker, or row of workers, has a micro-batch, or an encoded sum."""
    train, level, sharers = recipe.train, recipe.exchange.level, workers.layout.sharers
    leaves = train.num_micro_batches
    if level and sharers > num_nodes(leaves, level):
        return _too_few_sums(sharers, num_nodes(leaves, level), "micro-batches", level)
    if sharers > leaves:
        return (
            f"{sharers} ranks but only {count_of(leaves, 'micro-batch', 'micro-batches')} a step "
            f"(train.global_batch_size {train.global_batch_size} / train.micro_batch_size "
            f"{train.micro_batch_size}); use at most {count_of(leaves, 'rank', 'ranks')} or "
            "smaller micro-batches"
        )
    return ""


def _too_few_sums(ranks: int, nodes: int, of_what: str, level: int) -> str:
    return (
        f"{ranks} ranks but only {count_of(nodes, 'sum', 'sums')} of {1 << level} {of_what} to "
        f"encode (exchange.compressor_level {level}); use at most "
        f"{count_of(nodes, 'rank', 'ranks')} or a lower level"
    )


def check_joinable(words: SynchronyConfig) -> None:
    """Check a run for --join. Raises: RecipeError if workers cannot join after its start."""
    if not words.has_real_server:
        raise RecipeError(
            f"--join with synchrony.mode {words.mode}, synchrony.clock {words.clock}: workers come "
            "to runs that have a server and the real clock"
        )
    if not words.goes_on_without_workers or words.is_lockless:
        raise RecipeError(
            f"--join with synchrony.server {words.server}, synchrony.lock {words.lock}: workers "
            "come to runs whose weights are at rank 0, with server = first and lock = server"
        )


def _enough_learners(recipe: Recipe, workers: Workers) -> str:
    """Under the real clock, the learners are the workers times their micro-batches in flight."""
    synchrony = recipe.synchrony
    if not synchrony.has_real_server:
        return ""
    count = synchrony.num_learners(workers.world_size)
    of = count_of(workers.world_size, "worker", "workers")
    in_flight = (
        f" with synchrony.in_flight {synchrony.in_flight}" if synchrony.in_flight > 1 else ""
    )
    return learner_count_problem(synchrony, count, f"{count}, the learners of {of}{in_flight}")


def _enough_replicas(recipe: Recipe, workers: Workers) -> str:
    """Each worker, or row of workers, hosts a replica, or an encoded sum of some."""
    synchrony, level, sharers = recipe.synchrony, recipe.exchange.level, workers.layout.sharers
    if synchrony.mode != LOCAL:
        return ""
    if sharers > synchrony.replicas:
        return (
            f"synchrony.replicas is {synchrony.replicas} on {sharers} workers; each hosts one at "
            f"least, so there may be 1 to {synchrony.replicas} workers"
        )
    nodes = num_nodes(synchrony.replicas, level)
    return _too_few_sums(sharers, nodes, "replicas", level) if sharers > nodes else ""


def _schedule(recipe: Recipe, workers: Workers) -> str:
    """The exchange has a schedule for these workers and hosts."""
    algorithm = recipe.exchange.algorithm
    if algorithm in (NATIVE, AUTO_EXCHANGE):
        return ""
    try:
        find_schedule(algorithm, workers.per_host)(workers.world_size, 1)
    except ValueError as error:
        return f"exchange.algorithm: {error}"
    return ""


WORKERS_FIT = (
    Fit(("parallel.scheme", "exchange.compressor_level", *SIZES), _equal_samples),
    Fit(("exchange.compressor_level", *SIZES), _enough_micro_batches),
    Fit(
        ("synchrony.backup_workers", "synchrony.gradients_per_update", "synchrony.in_flight"),
        _enough_learners,
    ),
    Fit(("synchrony.replicas", "exchange.compressor_level"), _enough_replicas),
    Fit(("exchange.algorithm",), _schedule),
)


def check_hosts(recipe: Recipe, per_host: int, least: int, most: int, on_gpus: bool) -> RankLayout:
    """Check a run for each number of hosts from `least` to `most`; return the layout of the most.

    If a host leaves, the run has to continue. Raises: RecipeError.
    """
    layout = check_ranks(recipe, most * per_host, per_host, on_gpus)
    for hosts in range(most - 1, least - 1, -1):
        try:
            check_ranks(recipe, hosts * per_host, per_host, on_gpus)
        except RecipeError as error:
            raise RecipeError(
                f"--nnodes {least}:{most} may come to {hosts} host{'s' * (hosts > 1)}: {error}; "
                f"{_instead(recipe.parallel, per_host)}give --nnodes one number"
            ) from error
    return layout


def _instead(parallel: ParallelConfig, per_host: int) -> str:
    if parallel.data:
        return "leave parallel.data out, or "
    if per_host % parallel.row_size:
        return f"let each host have a multiple of {parallel.row_size} (--nproc-per-node), or "
    return ""


def check_ranks(recipe: Recipe, world_size: int, per_host: int, on_gpus: bool) -> RankLayout:
    """Check all that depends on the number of ranks; return their layout. Raises: RecipeError."""
    parallel = recipe.parallel
    if parallel.scheme == AUTO:  # any layout will do
        parallel = auto_of(recipe).layouts(parallel, world_size)[-1]
    layout = layout_of(parallel, world_size)
    hosts = -(-world_size // per_host)
    check_together(
        recipe, OF_RANKS, workers=world_size, hosts=hosts, gpus=on_gpus, system=sys.platform
    )
    workers = Workers(world_size, per_host, layout)
    raise_first(fit.problem(recipe, workers) for fit in WORKERS_FIT)
    return layout


def auto_of(recipe: Recipe) -> Auto:
    trick = recipe.replace("parallel.scheme", ONE_WEIRD_TRICK)
    schemes = ("none",) if is_refused(trick) else ("none", ONE_WEIRD_TRICK)
    return Auto(recipe.leaves.number, recipe.exchange.level, schemes)
