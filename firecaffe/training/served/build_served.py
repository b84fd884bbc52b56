"""Builds a training with a server: its policy, clock and memory, and the parts of its mode."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from firecaffe.data import SampleOrder
from firecaffe.data.train_batches import TrainBatches
from firecaffe.errors import RecipeError
from firecaffe.recipe.run import Run
from firecaffe.synchrony.clock import SimulatedClock, seconds_of
from firecaffe.synchrony.log import LogReader
from firecaffe.synchrony.server_policies import Leaves, make_policy
from firecaffe.training.checkpoint import Checkpoint
from firecaffe.training.divergence import Rise
from firecaffe.training.modes.every_step import EveryStep
from firecaffe.training.modes.mode import Linked, ModeParts, Steps
from firecaffe.training.piece import Numbers, NumbersOfParts, Piece
from firecaffe.training.served.coder import Coder, FeedbackEncoder, make_coder
from firecaffe.training.served.keeper import Keeper, KeptTraining
from firecaffe.training.served.late_rules import late_rule
from firecaffe.training.served.real import RealRanks
from firecaffe.training.served.real_clock import RealClock
from firecaffe.training.served.server import Server
from firecaffe.training.served.server_memory import ServerMemory
from firecaffe.training.served.server_steps import EventSource, LoggedClock, Progress, ServedStepper
from firecaffe.training.served.work_gradient import Computed, Contributions
from firecaffe.training.updates.every_rank import EveryRank


@dataclass
class Served(NumbersOfParts):
    """The parts of a training with a server. Its state is JSON; the memory is a piece."""

    keeper: Keeper
    server: Server
    memory: ServerMemory
    """The memory of all weights. If others keep them, the server has one of buffers only."""
    clock: LoggedClock
    real: RealClock | None
    leaves: Leaves
    progress: Progress
    coder: Coder

    def open(self, folder: Path, checkpoint: Checkpoint | None) -> list[str]:
        return self.keeper.open(self.clock, folder, checkpoint)

    def stepper(
        self,
        warm: EveryStep,
        batches: TrainBatches,
        source: LogReader | None = None,
        ranks: RealRanks | None = None,
    ) -> ServedStepper:
        """Make what runs the steps. With events from a log, all gradients are computed here."""
        if source is not None:
            source.add_follower(self.clock.follow)
        brought: Contributions = Computed(self.server, warm.holding.forward, batches, self.coder)
        if source is None and self.real is not None:
            brought = self.real
        events: EventSource = self.clock if source is None else source
        return ServedStepper(
            warm,
            self.server,
            events,
            brought,
            self.leaves,
            self.progress,
            self.coder,
            (lambda _: None) if ranks is None else ranks.tell,
        )

    def pieces(self) -> dict[str, Piece]:
        pieces: dict[str, Piece] = {"server": self.memory}
        if isinstance(self.coder, FeedbackEncoder) and self.real is None:
            pieces["compressor"] = self.coder
        return pieces

    @property
    def row(self) -> dict[str, Any]:
        measured = {} if self.real is None else self.real.row
        return {**self.clock.tally.row, **measured}

    def close(self) -> None:
        self.clock.close()

    @property
    def _parts(self) -> dict[str, Numbers]:
        return {"server": self.server, "clock": self.clock, "progress": self.progress}


def make_served(run: Run, update: EveryRank, keeper: Keeper, learners: int) -> Served:
    """Make a training with a server. `update` makes the warm steps.

    Raises: RecipeError if the training is no longer than its warm steps, or the file of measured
    speeds cannot be read.
    """
    synchrony, train = run.recipe.synchrony, run.recipe.train
    forward, named = update.holding.forward, update.holding.named
    optimizer, ema = update.applier.optimizer, update.applier.ema
    if synchrony.warm_steps >= run.steps:
        raise RecipeError(
            f"synchrony.warm_steps is {synchrony.warm_steps}, the training has {run.steps} steps; "
            "it must be less"
        )
    leaves = leaves_of(run.order, synchrony.warm_steps, run.steps)
    memory = ServerMemory(forward.model, named, squares=synchrony.compensate == "delay")
    clip, there = run.recipe.solver.clip_gradients, set(range(learners))
    local_memory = memory if keeper.has_weights else ServerMemory(forward.model, {}, squares=False)
    made = named, optimizer, local_memory, synchrony, there, forward.buffers, clip
    if keeper.has_weights:
        server = Server(*made, ema, late_rule=late_rule(synchrony.compensate, memory, named))
    else:
        server = Server(*made)
    policy = make_policy(synchrony, leaves, learners)
    real = RealClock(policy, local_memory, keeper.needs_all) if synchrony.clock == "real" else None
    clock = real or SimulatedClock(policy, seconds_of(synchrony, train.seed))
    logged = LoggedClock(clock, leaves.first_step, learners)
    coder = make_coder(run.recipe.exchange.codec, named)
    return Served(keeper, server, memory, logged, real, leaves, Progress(), coder)


def leaves_of(order: SampleOrder, first_step: int, last_step: int) -> Leaves:
    per_epoch = -(-order.num_samples // order.micro_batch_size)
    per_step = order.num_micro_batches
    return Leaves(first_step, last_step, order.steps_per_epoch, per_step, per_epoch)


class ServedParts(ModeParts):
    updates_by_batch = False

    def __init__(self, update: EveryRank, served: Served) -> None:
        super().__init__(update, Rise())
        self.served = served

    def pieces(self) -> dict[str, Piece]:
        return self.served.pieces()

    def numbers(self) -> dict[str, Numbers]:
        return {"synchrony": self.served} | super().numbers()

    def last_ahead(self, run: Run) -> int:
        return self.served.leaves.first_step

    def exchange_words(self, run: Run, by_ranks: str) -> str:
        warm = f"; in warm steps {by_ranks}" if self.served.leaves.first_step else ""
        return f"with a server, {run.recipe.synchrony.mode}{warm}"

    def steps(self, linked: Linked) -> Steps:
        real: RealRanks | None = None
        if self.served.real is not None and linked.source is None:
            real = self._ranks(linked)
        stepper = self.served.stepper(linked.step, linked.batches, linked.source, real)
        return Steps(stepper, linked.ahead, real)

    def _ranks(self, linked: Linked) -> RealRanks:
        run, served, holding = linked.run, self.served, self.holding
        synchrony, world, exchange = run.recipe.synchrony, linked.mesh.world, run.recipe.exchange
        assert served.real is not None
        whole = KeptTraining(
            run=run,
            world=world,
            named=holding.named,
            optimizer=self.update.applier.optimizer,
            state=linked.state,
            memory=served.memory,
            server=served.server,
            coder=served.coder,
        )
        return RealRanks(
            world,
            served.real,
            holding.forward,
            holding.named,
            served.coder,
            linked.batches,
            synchrony,
            exchange,
            facts_of(run, linked.probe, synchrony.num_learners(world.world_size)),
            meet=partial(served.keeper.meet, whole),
        )

    def row(self, steps: int) -> Mapping[str, Any] | None:
        return self.served.row

    def open(self, folder: Path, checkpoint: Checkpoint | None) -> list[str]:
        return self.served.open(folder, checkpoint)

    def last_words(self) -> list[str]:
        return [self.served.clock.tally.line]

    def close(self) -> None:
        self.served.close()


def facts_of(run: Run, probe: str, learners: int) -> dict[str, Any]:
    """Return what a worker that joins is told of a run, with the learners at its beginning."""
    deciding = json.loads(json.dumps(dict(run.deciding)))
    return {
        "deciding": deciding,
        "probe": probe,
        "learners": learners,
        "in_flight": run.recipe.synchrony.in_flight,
    }
