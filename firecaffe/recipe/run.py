"""A run, resolved: all that follows from its recipe, its data and its ranks, decided in one place.

Whoever builds, trains, saves or records takes what it needs from here and decides nothing again.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from firecaffe.data import Data, SampleOrder, drawing_of, shard_counts
from firecaffe.errors import RecipeError
from firecaffe.exchange.choose import AUTO
from firecaffe.exchange.leaves import Shares, equal_shares
from firecaffe.exchange.route import Route, find_route
from firecaffe.gradients.config import NO_COMPRESSOR
from firecaffe.recipe.check import CheckedRecipe
from firecaffe.recipe.config import check_batch
from firecaffe.recipe.fits import check_data_fit, too_short
from firecaffe.recipe.identity import identity
from firecaffe.recipe.sections import Recipe
from firecaffe.reference import without_folder
from firecaffe.solvers.policy import batch_scale, first_drop, learning_rate, momentum
from firecaffe.synchrony.config import EVERY_STEP, LOCAL, MEASURED
from firecaffe.synchrony.rounds import Rounds, plan_rounds
from firecaffe.words import MOST_STEPS


@dataclass(frozen=True)
class Ranks:
    """The ranks that train, as far as a run depends on them."""

    world_size: int = 1
    per_host: int = 1
    """The number of ranks of each host; 1 if hosts differ."""
    share_memory: bool = False
    """Whether ranks of one host may add in memory."""
    in_all: int = 0
    """The number of ranks with those that compute the same samples as others; 0: there are none."""


@dataclass(frozen=True)
class Run:
    """A run of so many ranks."""

    recipe: CheckedRecipe
    """The recipe as it was written."""
    ranks: Ranks
    order: SampleOrder
    """The order of samples: those of each micro-batch of each step."""
    deciding: Mapping[str, Any]
    """The words that decide bits, by name: a run is only resumed with the same."""
    algorithm: str
    """The exchange: that of the recipe, or what `auto` has chosen."""
    hook: str = ""
    """The name of a communication hook that takes its place."""

    @property
    def steps(self) -> int:
        """The steps of the whole training."""
        return self.recipe.train.num_steps(self.order.steps_per_epoch)

    @property
    def num_leaves(self) -> int:
        """Leaves of the tree over all workers: the micro-batches of a step, or, if replicas train
        by themselves, these.
        """
        words = self.recipe.synchrony
        return words.replicas if words.mode == LOCAL else self.recipe.train.num_micro_batches

    @property
    def leaves_in_words(self) -> str:
        """The leaves of the tree, for people."""
        what = "replicas" if self.recipe.synchrony.mode == LOCAL else "micro-batches"
        return f"{self.num_leaves} {what}"

    @cached_property
    def rounds(self) -> Rounds:
        """When replicas are averaged. In other modes all steps are synchronous.

        Raises: RecipeError if the training is shorter than a round.
        """
        words = self.recipe.synchrony
        if words.mode != LOCAL:
            return Rounds(self.steps)
        synchronous = words.warm_steps + words.warm_epochs * self.order.steps_per_epoch
        if words.warm_until_drop:
            drop = first_drop(self.recipe.solver, self.steps)
            if drop is None:
                raise RecipeError(
                    "synchrony.warm_until_drop: the rate does not drop in the training's "
                    f"{self.steps} steps; say warm_steps, or train longer"
                )
            synchronous = drop
        if line := too_short(words, synchronous, self.steps):
            raise RecipeError(line)
        return plan_rounds(words, synchronous, self.steps, self.learning_rate)

    @property
    def keeps_frozen(self) -> bool:
        """Whether parameters that forward changes, and that are not trained, are kept as buffers
        are.
        """
        words = self.recipe
        return words.parallel.is_whole and words.synchrony.mode == EVERY_STEP

    @property
    def has_exchange(self) -> bool:
        """Whether there is a sum over workers: with a server, in warm steps alone."""
        words = self.recipe.synchrony
        return not words.is_served or words.warm_steps > 0

    @property
    def synchronous(self) -> "Run":
        """The run as its steps before the first round are. Gradients are not encoded in these: what
        a codec keeps back of differences is not for them.
        """
        recipe = self.recipe
        if recipe.synchrony.mode != LOCAL:
            return self
        exchange = replace(recipe.exchange, compressor=NO_COMPRESSOR, compressor_level=0)
        every_step = replace(recipe.synchrony, mode=EVERY_STEP)
        return replace(self, recipe=replace(recipe, exchange=exchange, synchrony=every_step))

    def micro_batches(self, rank: int) -> list[int]:
        """A rank's micro-batches of each step, in the order in which it computes them."""
        words, share = self.recipe.synchrony, self.shares[rank]
        if words.mode != LOCAL:
            return self.route.order(self.num_leaves, share)
        each = self.recipe.train.num_micro_batches // words.replicas
        return list(range(share.start * each, share.stop * each))

    @cached_property
    def route(self) -> Route:
        """The route of the gradients; that of tree as long as `auto` has not chosen. With a server
        it is that of warm steps, in which none are encoded.
        """
        words = self.recipe.exchange
        return find_route(
            "tree" if self.algorithm == AUTO else self.algorithm,
            self.num_leaves,
            self.ranks.world_size,
            self.ranks.per_host,
            shared_memory=words.shared_memory and self.ranks.share_memory,
            codec="" if self.recipe.synchrony.is_served else words.codec,
            level=words.level,
            hook=self.hook,
            any_shares=self.recipe.synchrony.shares == MEASURED,
            to_owners=words.in_shards,
        )

    @cached_property
    def rate_scale(self) -> float:
        """The factor by which the recipe's learning rate grows with its batch."""
        return batch_scale(self.recipe.solver, self.recipe.train.global_batch_size)

    @property
    def title(self) -> str:
        """The network and the workers, for people."""
        name = re.sub(r"[^\w.]+", "-", without_folder(self.recipe.model.name))
        return f"{name}-{self.ranks.in_all or self.ranks.world_size}w"

    @property
    def shares(self) -> Shares:
        """The micro-batches of each rank; of the first steps, if they are balanced later."""
        level = self.recipe.exchange.level
        return equal_shares(self.num_leaves, self.ranks.world_size, level)

    def learning_rate(self, step: int) -> float:
        """The rate of step `step`, counted from 0."""
        return learning_rate(self.recipe.solver, step, self.steps, self.rate_scale)

    def momentum(self, step: int) -> float | None:
        """The momentum of step `step`, if the policy moves it."""
        return momentum(self.recipe.solver, step, self.steps)

    def by(self, algorithm: str) -> "Run":
        """The run with what `auto` has chosen."""
        return replace(self, algorithm=algorithm)

    def without_shared_memory(self) -> "Run":
        """The run of ranks that could not reach each other's memory."""
        return replace(self, ranks=replace(self.ranks, share_memory=False))


def resolve(
    recipe: CheckedRecipe, data: Data, ranks: Ranks, *, described: str, hook: str = ""
) -> Run:
    """The run of a checked recipe. described: the training data, in words that tell others apart.

    Raises: RecipeError if a step has more samples than there are, a training has too many steps, or
    numbers do not fit the data.
    """
    steps = total_steps(recipe, data)
    if steps > MOST_STEPS:
        raise RecipeError(
            f"train.epochs is {recipe.train.epochs}, which is {steps:,} steps; there may be at "
            f"most {MOST_STEPS:,}"
        )
    check_data_fit(recipe, data, steps)
    deciding = {**identity(recipe, steps), "the training data": described}
    return Run(recipe, ranks, sample_order(recipe, data), deciding, recipe.exchange.algorithm, hook)


def total_steps(recipe: Recipe, data: Data) -> int:
    """The steps of the whole training."""
    return recipe.train.num_steps(sample_order(recipe, data).steps_per_epoch)


def sample_order(recipe: Recipe, data: Data) -> SampleOrder:
    """The order of the training's samples. Raises: RecipeError if it cannot be."""
    config = recipe.train
    check_batch(config, len(data.train))
    return SampleOrder(
        config.seed,
        len(data.train),
        config.global_batch_size,
        config.micro_batch_size,
        shard_counts(data.train, recipe.data),
        drawing_of(data.train, recipe.data.balance),
    )
