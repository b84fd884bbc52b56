"""Builds a training with a server: its policy, clock and memory, and the keeper of its weights."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from firecaffe.data import SampleOrder
from firecaffe.errors import RecipeError
from firecaffe.recipe.run import Run
from firecaffe.synchrony.clock import SimulatedClock, seconds_of
from firecaffe.synchrony.config import FIRST, NO_LOCK, SHARDED, SynchronyConfig
from firecaffe.synchrony.server_policies import Leaves, make_policy
from firecaffe.training.checkpoint import Checkpoint
from firecaffe.training.divergence import LossRise
from firecaffe.training.modes.mode import Linked, ModeParts, Steps
from firecaffe.training.modes.served.coder import make_coder
from firecaffe.training.modes.served.lockless import SharedWeights
from firecaffe.training.modes.served.owners import Owners
from firecaffe.training.modes.served.real_clock import RealClock
from firecaffe.training.modes.served.real_ranks import RealRank, ServerRank, WorkerRank
from firecaffe.training.modes.served.server import LateRule, Server, late_rule
from firecaffe.training.modes.served.server_memory import ServerMemory
from firecaffe.training.modes.served.server_steps import LoggedClock, Progress, ServedStepper
from firecaffe.training.modes.served.work_gradient import (
    Holders,
    KeptTraining,
    LazyContributions,
    loss_scale,
)
from firecaffe.training.piece import Numbers, NumbersOfParts, Piece
from firecaffe.training.updates.every_rank import Applier, EveryRank


class OnFirstRank:
    """Keeps the weights on rank 0's server, which sends and updates them. Others extend it."""

    needs_all = False
    """Whether a lost rank ends the run, because no other has its part of the weights."""

    def server(
        self, run: Run, update: EveryRank, memory: ServerMemory, learners: set[int]
    ) -> Server:
        """Make rank 0's server. `memory` is of all weights."""
        words, holding = run.recipe.synchrony, update.holding
        return Server(
            named=holding.named,
            applier=update.applier,
            memory=memory,
            words=words,
            learners=learners,
            buffers=holding.forward.buffers,
            order=run.order,
            clip_gradients=run.recipe.solver.clip_gradients,
            late_rule=late_rule(words.compensate, memory, holding.named),
        )

    def open(self, clock: LoggedClock, folder: Path, checkpoint: Checkpoint | None) -> list[str]:
        """Open the log in the run's folder if events determine the run. Return lines for people."""
        return clock.open(folder, checkpoint)

    def meet(self, whole: KeptTraining) -> Holders:
        """Give the weights to their keepers, after the warm steps. All ranks call it.

        Raises: RecipeError on all ranks if they cannot keep the weights so; PeerLostError.
        """
        return Holders()


class InShards(OnFirstRank):
    """Keeps a shard of the weights on each rank; rank 0 decides, and has the buffers."""

    needs_all = True

    def server(
        self, run: Run, update: EveryRank, memory: ServerMemory, learners: set[int]
    ) -> Server:
        forward, whole = update.holding.forward, super().server(run, update, memory, learners)
        scale = partial(loss_scale, forward)
        buffers_only = ServerMemory(forward.model, {}, squares=False, more=scale)
        # The owners of the weights have the constraints and the moving average.
        applier = Applier(update.applier.optimizer, update.applier.scale)
        return replace(whole, applier=applier, memory=buffers_only, late_rule=LateRule())

    def meet(self, whole: KeptTraining) -> Holders:
        return Owners(whole)


class Lockless(InShards):
    """Keeps the weights in the memory of one host, where workers make updates themselves."""

    needs_all = False

    def open(self, clock: LoggedClock, folder: Path, checkpoint: Checkpoint | None) -> list[str]:
        return [
            "synchrony.lock none: workers write to the same weights without waiting for each "
            "other, so that this run cannot be replayed, and versions are approximate"
        ]

    def meet(self, whole: KeptTraining) -> Holders:
        return SharedWeights(whole)


KEEPERS: Mapping[str, Callable[[], OnFirstRank]] = {
    FIRST: OnFirstRank,
    SHARDED: InShards,
    NO_LOCK: Lockless,
}


def keeper_of(words: SynchronyConfig, world_size: int) -> OnFirstRank:
    """Return the keeper that a recipe asks for. A single worker keeps all weights."""
    name = words.keeper
    return KEEPERS[FIRST if name == SHARDED and world_size == 1 else name]()


class Served(ModeParts, NumbersOfParts):
    """A mode with a server. Its numbers are JSON, and the server's memory is a piece."""

    updates_by_batch = False
    rise: LossRise

    def __init__(self, run: Run, update: EveryRank, learners: int, world_size: int) -> None:
        """Begin with `learners` learners. `update` makes the warm steps.

        Raises: RecipeError if the training is no longer than its warm steps, or the file of
        measured speeds cannot be read.
        """
        super().__init__(update)
        synchrony, codec = run.recipe.synchrony, run.recipe.exchange.codec
        if synchrony.warm_steps >= run.steps:
            raise RecipeError(
                f"synchrony.warm_steps is {synchrony.warm_steps}, the training has {run.steps} "
                "steps; it must be less"
            )
        self.rise = LossRise()
        self.leaves = leaves_of(run.order, synchrony.warm_steps, run.steps)
        self.keeper = keeper_of(synchrony, world_size)
        forward, named = self.holding.forward, self.holding.named
        squares = synchrony.compensate == "delay"
        scale = partial(loss_scale, forward)
        self.memory = ServerMemory(forward.model, named, squares, more=scale)
        """The memory of all weights. If others keep them, the server's own has only buffers."""
        self.server = self.keeper.server(run, update, self.memory, set(range(learners)))
        policy = make_policy(synchrony, self.leaves, learners)
        self.real: RealClock | None = None
        if synchrony.clock == "real":
            self.real = RealClock(policy, self.server.memory, self.keeper.needs_all)
        clock = self.real or SimulatedClock(policy, seconds_of(synchrony, run.recipe.train.seed))
        self.clock = LoggedClock(clock, self.leaves.first_step, learners)
        self.progress, self.coder = Progress(), make_coder(codec, named)

    def pieces(self) -> dict[str, Piece]:
        pieces: dict[str, Piece] = {"server": self.memory}
        if self.real is None:
            pieces |= self.coder.pieces()
        return pieces

    def numbers(self) -> dict[str, Numbers]:
        return {"synchrony": self, "rise": self.rise}

    @property
    def _parts(self) -> dict[str, Numbers]:
        return {"server": self.server, "clock": self.clock, "progress": self.progress}

    def prefetch_end(self, run: Run) -> int:
        return self.leaves.first_step

    def describe_exchange(self, run: Run, by_ranks: str) -> str:
        warm = f"; in warm steps {by_ranks}" if self.leaves.first_step else ""
        return f"with a server, {run.recipe.synchrony.mode}{warm}"

    def steps(self, linked: Linked) -> Steps:
        stepper = partial(
            ServedStepper,
            warm=linked.step,
            server=self.server,
            plan=self.leaves,
            progress=self.progress,
            coder=self.coder,
        )
        if linked.source is None and self.real is not None:
            rank = self._rank(self.real, linked)
            served = stepper(source=self.clock, contributions=self.real, tell=rank.tell)
            return Steps(served, linked.ahead, rank)
        # All gradients are computed here.
        computed = LazyContributions(self.server, self.holding.forward, linked.batches, self.coder)
        if linked.source is not None:
            linked.source.add_follower(self.clock.follow)
        source = linked.source or self.clock
        return Steps(stepper(source=source, contributions=computed), linked.ahead)

    def _rank(self, clock: RealClock, linked: Linked) -> RealRank:
        run, world = linked.run, linked.mesh.world
        whole = KeptTraining(
            run=run,
            world=world,
            named=self.holding.named,
            optimizer=self.update.applier.optimizer,
            state=linked.state,
            memory=self.memory,
            server=self.server,
            coder=self.coder,
        )
        meet = partial(self.keeper.meet, whole)
        parts = world, self.holding, self.coder, linked.batches, run.recipe, meet
        if not world.is_first:
            return WorkerRank(*parts)
        learners = run.recipe.synchrony.num_learners(world.world_size)
        return ServerRank(*parts, clock=clock, facts=facts_of(run, linked.probe, learners))

    def row(self, steps: int) -> Mapping[str, Any] | None:
        measured = {} if self.real is None else self.real.row
        return {**self.clock.tally.row, **measured}

    def open(self, folder: Path, checkpoint: Checkpoint | None) -> list[str]:
        return self.keeper.open(self.clock, folder, checkpoint)

    def closing_lines(self) -> list[str]:
        return [self.clock.tally.line]

    def close(self) -> None:
        self.clock.close()


def leaves_of(order: SampleOrder, first_step: int, last_step: int) -> Leaves:
    per_epoch = -(-order.num_samples // order.micro_batch_size)
    per_step = order.num_micro_batches
    return Leaves(first_step, last_step, order.steps_per_epoch, per_step, per_epoch)


def facts_of(run: Run, probe: str, learners: int) -> dict[str, Any]:
    """Return what a worker that joins is told of a run, with the learners at its beginning."""
    deciding = json.loads(json.dumps(dict(run.deciding)))
    return {
        "deciding": deciding,
        "probe": probe,
        "learners": learners,
        "in_flight": run.recipe.synchrony.in_flight,
    }
