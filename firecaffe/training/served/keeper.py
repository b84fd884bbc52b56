"""Keepers of the weights of a training with a server; `training/choices.py` chooses one."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from torch import nn, optim

from firecaffe.cluster.world import World
from firecaffe.recipe.run import Run
from firecaffe.solvers.optimizer import make_optimizer
from firecaffe.training.checkpoint import Checkpoint
from firecaffe.training.evaluation_weights import Ema
from firecaffe.training.served.coder import Coder, FeedbackEncoder
from firecaffe.training.served.holders import Holders
from firecaffe.training.served.lockless import Rule, SharedWeights
from firecaffe.training.served.server import Server
from firecaffe.training.served.server_memory import ServerMemory
from firecaffe.training.served.server_steps import LoggedClock, weight_of
from firecaffe.training.served.shards.ranks import Owners, WholeTraining
from firecaffe.training.state import State


@dataclass(frozen=True)
class KeptTraining:
    run: Run
    world: World
    named: Mapping[str, nn.Parameter]
    optimizer: optim.Optimizer
    state: State
    memory: ServerMemory
    server: Server
    coder: Coder


class Keeper(Protocol):
    has_weights: bool
    """Whether rank 0's server has the weights; else it has the buffers only."""
    needs_all: bool
    """Whether a lost rank ends the run, because no other has its part of the weights."""

    def open(self, clock: LoggedClock, folder: Path, checkpoint: Checkpoint | None) -> list[str]:
        """Open the log in the run's folder if events determine the run. Return lines for people."""

    def meet(self, whole: KeptTraining) -> Holders:
        """Give the weights to their keepers, after the warm steps. All ranks call it.

        Raises: RecipeError on all ranks if they cannot have them so; PeerLostError.
        """


class AtFirst:
    """Keeps the weights on rank 0's server, which sends them and receives gradients."""

    has_weights, needs_all = True, False

    def open(self, clock: LoggedClock, folder: Path, checkpoint: Checkpoint | None) -> list[str]:
        return clock.open(folder, checkpoint)

    def meet(self, whole: KeptTraining) -> Holders:
        return Holders()


class InShards:
    """Keeps a shard of the weights on each rank; rank 0 decides, and has the buffers."""

    has_weights, needs_all = False, True

    def open(self, clock: LoggedClock, folder: Path, checkpoint: Checkpoint | None) -> list[str]:
        return clock.open(folder, checkpoint)

    def meet(self, whole: KeptTraining) -> Holders:
        recipe = whole.run.recipe
        config, synchrony = recipe.train, recipe.synchrony
        delayed = synchrony.delayed_updates(len(whole.server.learners))

        def ema_of(runs: Mapping[str, nn.Parameter]) -> Ema | None:
            return Ema(runs, config.ema_decay, config.ema_warmup) if config.ema_decay else None

        training = WholeTraining(
            state=whole.state,
            named=whole.named,
            memory=whole.memory,
            server=whole.server,
            coder=whole.coder,
            optimizer_of=partial(make_optimizer, whole.named, recipe.solver, delayed),
            ema_of=ema_of,
            weight_of=partial(weight_of, whole.run.order),
            needs_whole=recipe.updates_whole_layers or isinstance(whole.coder, FeedbackEncoder),
        )
        return Owners.meet(whole.world, training, synchrony.in_flight, recipe.exchange.timeout_s)


class Lockless:
    """Keeps the weights in the memory of one host, where workers make updates themselves."""

    has_weights, needs_all = False, False

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
