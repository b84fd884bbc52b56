"""The parts of a mode with a server, and its ranks under the real clock, once connected."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from firecaffe.recipe.run import Run
from firecaffe.training.checkpoint import Checkpoint
from firecaffe.training.divergence import Rise
from firecaffe.training.modes.mode import Linked, ModeParts, Steps
from firecaffe.training.piece import Numbers, Piece
from firecaffe.training.served.build_served import Served
from firecaffe.training.served.keeper import Whole
from firecaffe.training.served.real import RealRanks
from firecaffe.training.updates.every_rank import EveryRank


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
        whole = Whole(
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
