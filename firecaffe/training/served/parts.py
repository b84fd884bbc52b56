"""What a mode with a server has of its own; and its ranks under the real clock, once connected."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from firecaffe.recipe.run import Run
from firecaffe.solvers.optimizer import make_optimizer
from firecaffe.synchrony.config import SHARDED
from firecaffe.training.checkpoint import Checkpoint
from firecaffe.training.ema import Ema
from firecaffe.training.holdings.holding import Holding
from firecaffe.training.modes.parts import EveryStepParts, Linked, Steps
from firecaffe.training.piece import Numbers, Piece
from firecaffe.training.rise import Rise
from firecaffe.training.served.holders import Holders
from firecaffe.training.served.lockless.bench import Rule
from firecaffe.training.served.lockless.weights import SharedWeights
from firecaffe.training.served.make import Served
from firecaffe.training.served.real import RealRanks
from firecaffe.training.served.shards.ranks import Owners, WholeTraining
from firecaffe.training.served.stepper import delayed_updates, weight_of
from firecaffe.training.state import State
from firecaffe.training.updates.every_rank import EveryRank


class ServedParts(EveryStepParts):
    """See `ModeParts`."""

    def __init__(self, update: EveryRank, served: Served) -> None:
        super().__init__(update, Rise())
        self.served = served

    def pieces(self) -> dict[str, Piece]:
        return self.served.pieces()

    def numbers(self) -> dict[str, Numbers]:
        return {"synchrony": self.served} | super().numbers()

    def last_ahead(self, run: Run) -> int:
        return self.served.leaves.first_step

    def steps(self, linked: Linked) -> Steps:
        real: RealRanks | None = None
        if self.served.real is not None and linked.source is None:
            real = self._ranks(linked)
        stepper = self.served.stepper(linked.step, linked.batches, linked.source, real)
        return Steps(stepper, linked.ahead, real)

    def _ranks(self, linked: Linked) -> RealRanks:
        run, served, holding = linked.run, self.served, self.holding
        words, world, exchange = run.recipe.synchrony, linked.mesh.world, run.recipe.exchange
        assert served.real is not None
        meet: Callable[[], Holders] | None = None
        if words.server == SHARDED and world.world_size > 1:
            whole = _whole(run, holding, linked.state, served)
            meet = partial(Owners.meet, world, whole, words.in_flight, exchange.timeout_s)
        if words.is_lockless:
            parts = holding.named, self.update.applier.optimizer, _rule(run)
            meet = partial(SharedWeights.meet, world, *parts, exchange.timeout_s)
        return RealRanks(
            world,
            served.real,
            holding.forward,
            holding.named,
            served.coder,
            linked.batches,
            words,
            exchange,
            facts_of(run, linked.probe, words.num_learners(world.world_size)),
            meet=meet,
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
    """What a worker that comes is told of a run. probe: its digest. learners: at the beginning."""
    deciding = json.loads(json.dumps(dict(run.deciding)))
    return {
        "deciding": deciding,
        "probe": probe,
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
        clip_gradients=run.recipe.solver.clip_gradients,
    )


def _whole(run: Run, holding: Holding, state: State, served: Served) -> WholeTraining:
    """The training, for owners of parts of its weights."""
    config, solver, count = run.recipe.train, run.recipe.solver, len(served.server.learners)
    delayed = delayed_updates(run.recipe.synchrony, count)

    def ema_of(runs: Mapping[str, nn.Parameter]) -> Ema | None:
        return Ema(runs, config.ema_decay, config.ema_warmup) if config.ema_decay else None

    return WholeTraining(
        state=state,
        named=holding.named,
        memory=served.memory,
        server=served.server,
        coder=served.coder,
        optimizer_of=partial(make_optimizer, holding.named, solver, delayed),
        ema_of=ema_of,
        weight_of=partial(weight_of, run.order),
    )
