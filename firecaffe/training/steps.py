"""Builds what runs a training's steps: its stepper, and where this rank's batches come from."""

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

from firecaffe.cluster.world import World
from firecaffe.data import Data
from firecaffe.data.train_batches import BatchesAhead
from firecaffe.gradients.reducer import GradientReducer
from firecaffe.recipe.run import Run
from firecaffe.training.connect import connect
from firecaffe.training.data_workers import data_workers
from firecaffe.training.learner import Learner
from firecaffe.training.local.make import local_stepper
from firecaffe.training.local.stepper import LocalStepper
from firecaffe.training.plugins import Plugin, around_batches
from firecaffe.training.served.real import RealRanks
from firecaffe.training.served.stepper import ServedStepper
from firecaffe.training.step import Stepper


@dataclass(frozen=True)
class Steps:
    """The stepper of a recipe's mode of synchrony."""

    stepper: Stepper | ServedStepper | LocalStepper
    ahead: BatchesAhead
    """Where the stepper's batches come from."""
    real: RealRanks | None
    """The ranks under the real clock; None if there is none."""


def make_steps(
    run: Run,
    learner: Learner,
    world: World,
    data: Data,
    reducer: GradientReducer,
    plugins: Sequence[Plugin],
    first_step: int,
    is_repeatable: bool,
    resources: ExitStack,
) -> Steps:
    """Every rank calls it.

    Args:
        reducer: Sums the gradients, or what replicas are averaged by.
        first_step: The step from which this training goes on.
        is_repeatable: Whether the training data are; doubts are added to the learner's if they
            turn out not to be.
        resources: Takes what has to be closed.
    """
    recipe, served, local = run.recipe, learner.served, learner.local
    first = run.synchronous if first_step < run.rounds.synchronous else run
    leaves = first.micro_batches(world.rank)
    late_doubts = learner.doubts if is_repeatable else None
    last_ahead = run.steps if served is None else served.leaves.first_step
    ahead = BatchesAhead(learner.batches, leaves, first_step, last_ahead, late_doubts)
    resources.enter_context(closing(ahead))
    resources.enter_context(data_workers(data))  # closed first, so that nobody waits for them
    sums = reducer
    if local is not None and first is not run:
        _, sums, _ = connect(first, learner, world, None, resources)
    batches, clip = around_batches(plugins, ahead, world), recipe.solver.clip_gradients
    stepper = Stepper(learner.forward, batches, learner.optimizer, sums, leaves, clip)
    stepper.momentum, stepper.ema = run.momentum, learner.ema
    if local is not None:
        own = local_stepper(local, run, world, stepper, ahead, reducer, resources)
        return Steps(own, ahead, None)
    if served is None:
        return Steps(stepper, ahead, None)
    in_any_order = around_batches(plugins, learner.batches, world)
    real: RealRanks | None = None
    if served.real is not None:
        words, timeout_s = recipe.synchrony, recipe.exchange.timeout_s
        made = world, served.real, learner.forward, learner.named, in_any_order
        real = RealRanks(*made, words, timeout_s)
    return Steps(served.stepper(stepper, in_any_order), ahead, real)
