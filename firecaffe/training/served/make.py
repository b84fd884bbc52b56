"""Builds a training with a server from a run: its policy, its clock and its memory."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firecaffe.data import SampleOrder
from firecaffe.data.train_batches import TrainBatches
from firecaffe.errors import RecipeError
from firecaffe.recipe.run import Run
from firecaffe.synchrony.clock import SimulatedClock, seconds_of
from firecaffe.synchrony.leaves import Leaves
from firecaffe.synchrony.policies import make_policy
from firecaffe.training.checkpoint import Checkpoint
from firecaffe.training.modes.every_step import EveryStep
from firecaffe.training.piece import Numbers, NumbersOfParts, Piece
from firecaffe.training.served.coder import Coder, FeedbackEncoder, make_coder
from firecaffe.training.served.compute import Computed, Contributions
from firecaffe.training.served.keeper import Keeper
from firecaffe.training.served.memory import ServerMemory
from firecaffe.training.served.real import RealRanks
from firecaffe.training.served.real_clock import RealClock
from firecaffe.training.served.server import Server
from firecaffe.training.served.stepper import LoggedClock, Progress, ServedStepper, Source
from firecaffe.training.updates.every_rank import EveryRank


@dataclass
class Served(NumbersOfParts):
    """What a training with a server has beside others. Its state is JSON; the memory is a piece."""

    keeper: Keeper
    server: Server
    memory: ServerMemory
    """Of all the weights. If others keep them, the server has one of buffers alone."""
    clock: LoggedClock
    real: RealClock | None
    """The clock that is logged, if it is a real one."""
    leaves: Leaves
    progress: Progress
    coder: Coder
    """Of what learners push."""

    def open(self, folder: Path, checkpoint: Checkpoint | None) -> list[str]:
        """See `Keeper.open`."""
        return self.keeper.open(self.clock, folder, checkpoint)

    def stepper(
        self,
        warm: EveryStep,
        batches: TrainBatches,
        source: Source | None = None,
        ranks: RealRanks | None = None,
    ) -> ServedStepper:
        """What runs the steps. batches: asked for leaves in any order. source: of the events,
        instead of the clock; then all gradients are computed here. ranks: those that hear of them.
        """
        brought: Contributions = Computed(self.server, warm.holding.forward, batches, self.coder)
        if source is None and self.real is not None:
            brought = self.real
        events = self.clock if source is None else source
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
        """What of a training's state are tensors."""
        found: dict[str, Piece] = {"server": self.memory}
        if isinstance(self.coder, FeedbackEncoder) and self.real is None:
            found["compressor"] = self.coder
        return found

    @property
    def row(self) -> dict[str, Any]:
        """What the events have come to, as result.json has it."""
        measured = {} if self.real is None else self.real.row
        return {**self.clock.tally.row, **measured}

    def close(self) -> None:
        self.clock.close()

    @property
    def _parts(self) -> dict[str, Numbers]:
        return {"server": self.server, "clock": self.clock, "progress": self.progress}


def make_served(run: Run, update: EveryRank, keeper: Keeper, learners: int) -> Served:
    """update: of the warm steps. learners: those that are there at the beginning.

    Raises: RecipeError if the training is no longer than its warm steps, or the file of measured
    speeds cannot be read.
    """
    words, train = run.recipe.synchrony, run.recipe.train
    forward, named = update.holding.forward, update.holding.named
    optimizer, ema = update.applier.optimizer, update.applier.ema
    if words.warm_steps >= run.steps:
        raise RecipeError(
            f"synchrony.warm_steps is {words.warm_steps}, the training has {run.steps} steps; it "
            "must be less"
        )
    leaves = leaves_of(run.order, words.warm_steps, run.steps)
    memory = ServerMemory(forward.model, named, squares=words.compensate == "delay")
    clip, there = run.recipe.solver.clip_gradients, set(range(learners))
    own = memory if keeper.has_weights else ServerMemory(forward.model, {}, squares=False)
    made = named, optimizer, own, words, there, forward.buffers, clip
    server = Server(*made, ema=ema if keeper.has_weights else None)
    policy = make_policy(words, leaves, learners)
    real = RealClock(policy, own, keeper.needs_all) if words.clock == "real" else None
    clock = real or SimulatedClock(policy, seconds_of(words, train.seed))
    logged = LoggedClock(clock, leaves.first_step, learners)
    coder = make_coder(run.recipe.exchange.codec, named)
    return Served(keeper, server, memory, logged, real, leaves, Progress(), coder)


def leaves_of(order: SampleOrder, first_step: int, last_step: int) -> Leaves:
    """The leaves with samples of some steps."""
    per_epoch = -(-order.num_samples // order.micro_batch_size)
    per_step = order.num_micro_batches
    return Leaves(first_step, last_step, order.steps_per_epoch, per_step, per_epoch)
