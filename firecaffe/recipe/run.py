"""A resolved run: all that follows from its recipe, its data and its ranks, decided in one place.

Code that builds, trains, saves or records reads it here and decides nothing again.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from firecaffe.data import Data, SampleOrder, shard_counts, weighted_draws
from firecaffe.errors import RecipeError
from firecaffe.exchange import AUTO
from firecaffe.exchange.leaves import Shares, equal_shares
from firecaffe.exchange.route import Route, find_route
from firecaffe.gradients.config import NO_COMPRESSOR
from firecaffe.recipe.checked_recipe import CheckedRecipe
from firecaffe.recipe.fits import check_batch, check_data_fit, too_short
from firecaffe.recipe.sections import Recipe, identity
from firecaffe.solvers.rate_policy import batch_scale, first_drop, learning_rate, momentum
from firecaffe.synchrony.config import EVERY_STEP, LOCAL
from firecaffe.synchrony.rounds import Rounds, plan_rounds
from firecaffe.user_code import without_folder
from firecaffe.value_checks import MAX_STEPS


@dataclass(frozen=True)
class Ranks:
    world_size: int = 1
    per_host: int = 1
    """The number of ranks of each host; 1 if hosts differ."""
    share_memory: bool = False
    in_all: int = 0
    """The number of ranks, including those that share another's samples; 0 if none does."""


@dataclass(frozen=True)
class Run:
    recipe: CheckedRecipe
    ranks: Ranks
    order: SampleOrder
    deciding: Mapping[str, Any]
    """The settings that decide bits, by name. A run is only resumed with equal ones."""
    algorithm: str
    """The exchange: that of the recipe, or the choice of `auto`."""
    hook: str = ""
    """The name of a communication hook that replaces the exchange."""

    @property
    def steps(self) -> int:
        return self.recipe.train.num_steps(self.order.steps_per_epoch)

    @property
    def num_leaves(self) -> int:
        return self.recipe.leaves.number

    @cached_property
    def rounds(self) -> Rounds:
        """The steps that average replicas. Raises: RecipeError if training has no whole round."""
        synchrony = self.recipe.synchrony
        if synchrony.mode != LOCAL:
            return Rounds(self.steps)
        synchronous = synchrony.warm_steps + synchrony.warm_epochs * self.order.steps_per_epoch
        if synchrony.warm_until_drop:
            drop = first_drop(self.recipe.solver, self.steps)
            if drop is None:
                raise RecipeError(
                    "synchrony.warm_until_drop: the rate does not drop in the training's "
                    f"{self.steps} steps; say warm_steps, or train longer"
                )
            synchronous = drop
        if line := too_short(synchrony, synchronous, self.steps):
            raise RecipeError(line)
        return plan_rounds(synchrony, synchronous, self.steps, self.learning_rate)

    @property
    def keeps_frozen(self) -> bool:
        """Whether untrained parameters that forward changes are kept as buffers are."""
        recipe = self.recipe
        return recipe.parallel.is_whole and recipe.synchrony.mode == EVERY_STEP

    @property
    def has_exchange(self) -> bool:
        """Whether there is a sum over workers. With a server, there is one only in warm steps."""
        synchrony = self.recipe.synchrony
        return not synchrony.is_served or synchrony.warm_steps > 0

    @property
    def synchronous(self) -> "Run":
        """The run before its first round, in mode local. Gradients are not encoded then."""
        recipe = self.recipe
        if recipe.synchrony.mode != LOCAL:
            return self
        # A codec's residual of replicas' differences is not for gradients.
        exchange = replace(recipe.exchange, compressor=NO_COMPRESSOR, compressor_level=0)
        every_step = replace(recipe.synchrony, mode=EVERY_STEP)
        return replace(self, recipe=replace(recipe, exchange=exchange, synchrony=every_step))

    def micro_batches(self, rank: int) -> list[int]:
        """Return a rank's micro-batches of each step, in the order in which it computes them."""
        synchrony, share = self.recipe.synchrony, self.shares[rank]
        if synchrony.mode != LOCAL:
            return self.route.order(self.num_leaves, share)
        per_replica = self.recipe.train.num_micro_batches // synchrony.replicas
        return list(range(share.start * per_replica, share.stop * per_replica))

    @cached_property
    def route(self) -> Route:
        """The gradients' route: tree before `auto` chooses; with a server, that of warm steps."""
        exchange = self.recipe.exchange
        return find_route(
            "tree" if self.algorithm == AUTO else self.algorithm,
            self.num_leaves,
            self.ranks.world_size,
            self.ranks.per_host,
            shared_memory=exchange.shared_memory and self.ranks.share_memory,
            codec="" if self.recipe.synchrony.is_served else exchange.codec,
            level=exchange.level,
            hook=self.hook,
            any_shares=self.recipe.synchrony.measures_shares,
            to_owners=exchange.in_shards,
        )

    @cached_property
    def rate_scale(self) -> float:
        return batch_scale(self.recipe.solver, self.recipe.train.global_batch_size)

    @property
    def title(self) -> str:
        name = re.sub(r"[^\w.]+", "-", without_folder(self.recipe.model.name))
        return f"{name}-{self.ranks.in_all or self.ranks.world_size}w"

    @property
    def shares(self) -> Shares:
        """The micro-batches of each rank, in the first steps if they are balanced later."""
        level = self.recipe.exchange.level
        return equal_shares(self.num_leaves, self.ranks.world_size, level)

    def learning_rate(self, step: int) -> float:
        return learning_rate(self.recipe.solver, step, self.steps, self.rate_scale)

    def momentum(self, step: int) -> float | None:
        return momentum(self.recipe.solver, step, self.steps)


def resolve(
    recipe: CheckedRecipe, data: Data, ranks: Ranks, *, described: str, hook: str = ""
) -> Run:
    """Resolve a recipe. described: what identifies the training data. Raises: RecipeError."""
    steps = total_steps(recipe, data)
    if steps > MAX_STEPS:
        raise RecipeError(
            f"train.epochs is {recipe.train.epochs}, which is {steps:,} steps; there may be at "
            f"most {MAX_STEPS:,}"
        )
    check_data_fit(recipe, data, steps)
    deciding = {**identity(recipe, steps), "the training data": described}
    return Run(recipe, ranks, sample_order(recipe, data), deciding, recipe.exchange.algorithm, hook)


def total_steps(recipe: Recipe, data: Data) -> int:
    return recipe.train.num_steps(sample_order(recipe, data).steps_per_epoch)


def sample_order(recipe: Recipe, data: Data) -> SampleOrder:
    """Return the order of the training's samples. Raises: RecipeError if the batch is too large."""
    config = recipe.train
    check_batch(config, len(data.train))
    return SampleOrder(
        config.seed,
        len(data.train),
        config.global_batch_size,
        config.micro_batch_size,
        shard_counts(data.train, recipe.data),
        weighted_draws(data.train, recipe.data.balance),
    )
