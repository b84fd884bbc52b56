"""Builds what runs a training's steps: its stepper, and where this rank's batches come from."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from firecaffe.data import Data
from firecaffe.data.train_batches import BatchesAhead
from firecaffe.gradients.reducer import GradientReducer
from firecaffe.recipe.run import Run
from firecaffe.solvers.optimizer import make_optimizer
from firecaffe.synchrony.config import SHARDED
from firecaffe.training.connect import connect
from firecaffe.training.data_workers import data_workers
from firecaffe.training.ema import Ema
from firecaffe.training.learner import Learner
from firecaffe.training.local.make import local_stepper
from firecaffe.training.local.stepper import LocalStepper
from firecaffe.training.parallel.mesh import Mesh
from firecaffe.training.parallel.network import SplitNetwork
from firecaffe.training.parallel.shard_step import ShardStepper
from firecaffe.training.parallel.shards import ShardEma
from firecaffe.training.parallel.stage_step import StageStepper
from firecaffe.training.parallel.step import make_rows
from firecaffe.training.plugins import Plugin, around_batches
from firecaffe.training.served.holders import Holders
from firecaffe.training.served.lockless.bench import Rule
from firecaffe.training.served.lockless.weights import SharedWeights
from firecaffe.training.served.make import Served
from firecaffe.training.served.real import RealRanks
from firecaffe.training.served.shards.ranks import Owners, Whole
from firecaffe.training.served.source import Source
from firecaffe.training.served.stepper import ServedStepper, delayed_updates, weight_of
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
    mesh: Mesh,
    data: Data,
    reducers: Sequence[GradientReducer],
    plugins: Sequence[Plugin],
    first_step: int,
    is_repeatable: bool,
    resources: ExitStack,
    source: Source | None = None,
) -> Steps:
    """Every rank calls it.

    Args:
        reducers: The one that sums the gradients, or what averages each fragment of replicas.
        first_step: The step from which this training goes on.
        is_repeatable: Whether the training data are; doubts are added to the learner's if they
            turn out not to be.
        resources: Takes what has to be closed.
        source: Of a server's events, instead of its clock.
    """
    recipe, served, local = run.recipe, learner.served, learner.local
    world = mesh.world
    first = run.synchronous if first_step < run.rounds.synchronous else run
    leaves = first.micro_batches(mesh.sharers.rank)
    fetched = leaves if learner.stage is None or learner.stage.has_inputs else []
    late_doubts = learner.doubts if is_repeatable else None
    last_ahead = run.steps if served is None else served.leaves.first_step
    ahead = BatchesAhead(learner.batches, fetched, first_step, last_ahead, late_doubts)
    resources.enter_context(closing(ahead))
    resources.enter_context(data_workers(data))  # closed first, so that nobody waits for them
    sums = reducers[0]
    if local is not None and first is not run:
        _, [sums], _ = connect(first, learner, mesh.sharers, None, resources)
    batches, clip = around_batches(plugins, ahead, world), recipe.solver.clip_gradients
    made_of = learner.forward, batches, learner.optimizer, sums, leaves, clip
    stepper = Stepper(*made_of)
    if learner.stage is not None:
        stepper = StageStepper(*made_of, stage=learner.stage)
    elif learner.shards is not None:
        stepper = ShardStepper(*made_of)
    elif isinstance(learner.split, SplitNetwork):
        stepper.rows = make_rows(
            run,
            learner.split,
            learner.named,
            learner.forward,
            learner.stand_in,
            learner.part_codec,
        )
    stepper.momentum, stepper.ema = run.momentum, learner.ema
    stepper.constraints = learner.constraints
    if learner.shards is not None and learner.ema is not None:
        stepper.ema = ShardEma(learner.ema, sums.gather_weights)
    if local is not None:
        own = local_stepper(local, run, mesh, stepper, ahead, reducers, resources)
        return Steps(own, ahead, None)
    if served is None:
        return Steps(stepper, ahead, None)
    in_any_order = around_batches(plugins, learner.batches, world)
    real: RealRanks | None = None
    if served.real is not None and source is None:
        made = world, served.real, learner.forward, learner.named, served.coder, in_any_order
        words, timeout_s = recipe.synchrony, recipe.exchange.timeout_s
        meet: Callable[[], Holders] | None = None
        if words.server == SHARDED and world.world_size > 1:
            whole = _whole(run, learner, served)
            meet = partial(Owners.meet, world, whole, words.in_flight, timeout_s)
        if words.is_lockless:
            parts = learner.named, learner.optimizer, _rule(run)
            meet = partial(SharedWeights.meet, world, *parts, timeout_s)
        told = facts_of(run, learner, words.num_learners(world.world_size))
        real = RealRanks(*made, words, recipe.exchange, told, meet=meet)
    own_stepper = served.stepper(stepper, in_any_order, source)
    if real is not None:
        own_stepper.tell = real.tell
    return Steps(own_stepper, ahead, real)


def facts_of(run: Run, learner: Learner, learners: int) -> dict[str, Any]:
    """What a worker that comes is told of a run. learners: at the beginning."""
    deciding = json.loads(json.dumps(dict(run.deciding)))
    return {
        "deciding": deciding,
        "probe": learner.probe.digest,
        "learners": learners,
        "in_flight": run.recipe.synchrony.in_flight,
    }


def _rule(run: Run) -> Rule:
    """How workers update weights that they share."""
    return Rule(
        optimizer_of=partial(make_optimizer, config=run.recipe.solver),
        rate=run.learning_rate,
        momentum=run.momentum,
        weight_of=partial(weight_of, run.order),
    )


def _whole(run: Run, learner: Learner, served: Served) -> Whole:
    """The training, for owners of parts of its weights."""
    config, solver, count = run.recipe.train, run.recipe.solver, len(served.server.learners)
    delayed = delayed_updates(run.recipe.synchrony, count)

    def ema_of(runs: Mapping[str, nn.Parameter]) -> Ema | None:
        return Ema(runs, config.ema_decay, config.ema_warmup) if config.ema_decay else None

    return Whole(
        state=learner.state,
        named=learner.named,
        memory=served.memory,
        server=served.server,
        coder=served.coder,
        optimizer_of=partial(make_optimizer, learner.named, solver, delayed),
        ema_of=ema_of,
        weight_of=partial(weight_of, run.order),
    )
