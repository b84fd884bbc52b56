"""Keepers of the weights of a training with a server."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

from firecaffe.recipe.run import Run
from firecaffe.solvers.optimizer import make_optimizer
from firecaffe.synchrony.config import FIRST, NO_LOCK, SHARDED, SynchronyConfig
from firecaffe.training.checkpoint import Checkpoint
from firecaffe.training.modes.served.holders import Holders, KeptTraining
from firecaffe.training.modes.served.late_rules import late_rule
from firecaffe.training.modes.served.lockless import Rule, SharedWeights
from firecaffe.training.modes.served.server import Server
from firecaffe.training.modes.served.server_memory import ServerMemory
from firecaffe.training.modes.served.server_steps import LoggedClock, weight_of
from firecaffe.training.modes.served.shards.ranks import Owners
from firecaffe.training.updates.applier import Applier
from firecaffe.training.updates.every_rank import EveryRank


class Keeper(Protocol):
    needs_all: bool
    """Whether a lost rank ends the run, because no other has its part of the weights."""

    def server(
        self, run: Run, update: EveryRank, memory: ServerMemory, learners: set[int]
    ) -> Server:
        """Make rank 0's server. `memory` is of all weights."""

    def open(self, clock: LoggedClock, folder: Path, checkpoint: Checkpoint | None) -> list[str]:
        """Open the log in the run's folder if events determine the run. Return lines for people."""

    def meet(self, whole: KeptTraining) -> Holders:
        """Give the weights to their keepers, after the warm steps. All ranks call it.

        Raises: RecipeError on all ranks if they cannot have them so; PeerLostError.
        """


class AtFirst:
    """Keeps the weights on rank 0's server, which sends them and receives gradients."""

    needs_all = False

    def server(
        self, run: Run, update: EveryRank, memory: ServerMemory, learners: set[int]
    ) -> Server:
        recipe, holding, applier = run.recipe, update.holding, update.applier
        words, clip = recipe.synchrony, recipe.solver.clip_gradients
        made = holding.named, applier, memory, words, learners, holding.forward.buffers
        rule = late_rule(words.compensate, memory, holding.named)
        return Server(*made, clip, late_rule=rule)

    def open(self, clock: LoggedClock, folder: Path, checkpoint: Checkpoint | None) -> list[str]:
        return clock.open(folder, checkpoint)

    def meet(self, whole: KeptTraining) -> Holders:
        return Holders()


class InShards:
    """Keeps a shard of the weights on each rank; rank 0 decides, and has the buffers."""

    needs_all = True

    def server(
        self, run: Run, update: EveryRank, memory: ServerMemory, learners: set[int]
    ) -> Server:
        recipe, forward = run.recipe, update.holding.forward
        words, clip = recipe.synchrony, recipe.solver.clip_gradients
        buffers_only = ServerMemory(forward.model, {}, squares=False)
        # The owners of the weights have the constraints and the moving average.
        applier = Applier(update.applier.optimizer, update.applier.scale)
        made = update.holding.named, applier, buffers_only, words, learners
        return Server(*made, forward.buffers, clip)

    def open(self, clock: LoggedClock, folder: Path, checkpoint: Checkpoint | None) -> list[str]:
        return clock.open(folder, checkpoint)

    def meet(self, whole: KeptTraining) -> Holders:
        return Owners.meet(whole)


class Lockless(InShards):
    """Keeps the weights in the memory of one host, where workers make updates themselves."""

    needs_all = False

    def open(self, clock: LoggedClock, folder: Path, checkpoint: Checkpoint | None) -> list[str]:
        return [
            "synchrony.lock none: workers write to the same weights without waiting for each "
            "other, so that this run cannot be replayed, and versions are approximate"
        ]

    def meet(self, whole: KeptTraining) -> Holders:
        run = whole.run
        rule = Rule(
            optimizer_of=partial(make_optimizer, config=run.recipe.solver),
            rate=run.learning_rate,
            momentum=run.momentum,
            weight_of=partial(weight_of, run.order),
            clip_gradients=run.recipe.solver.clip_gradients,
        )
        timeout_s = run.recipe.exchange.timeout_s
        return SharedWeights.meet(whole.world, whole.named, whole.optimizer, rule, timeout_s)


KEEPERS: Mapping[str, Callable[[], Keeper]] = {
    FIRST: AtFirst,
    SHARDED: InShards,
    NO_LOCK: Lockless,
}


def keeper_of(words: SynchronyConfig, world_size: int) -> Keeper:
    """Return the keeper that a recipe asks for. A single worker keeps all weights."""
    name = words.keeper
    return KEEPERS[FIRST if name == SHARDED and world_size == 1 else name]()
