"""What mode local has of its own: replicas, and averages of their differences."""

from collections.abc import Mapping, Sequence
from typing import Any

from firecaffe.recipe.run import Run
from firecaffe.training.local.make import Local, local_stepper
from firecaffe.training.modes.parts import EveryStepParts, Linked, Steps, Summed
from firecaffe.training.piece import Piece
from firecaffe.training.rise import Rise
from firecaffe.training.updates.every_rank import EveryRank


class LocalParts(EveryStepParts):
    """See `ModeParts`."""

    def __init__(self, update: EveryRank, local: Local) -> None:
        super().__init__(update, Rise())
        self._local = local

    def pieces(self) -> dict[str, Piece]:
        return self._local.pieces(self.holding)

    def first_run(self, run: Run, first_step: int) -> Run:
        return run.synchronous if first_step < run.rounds.synchronous else run

    def summed(self) -> Sequence[Summed]:
        """Fragments of the replicas' differences."""
        local, counts = self._local, self._local.sums.no_counts()
        tails = local.tails(self.holding.forward)
        parts = zip(local.fragments, tails, strict=True)
        return [Summed(fragment.named, tail, counts) for fragment, tail in parts]

    def steps(self, linked: Linked) -> Steps:
        made = linked.step, self.update, linked.ahead, linked.reducers, linked.resources
        return Steps(local_stepper(self._local, linked.run, linked.mesh, *made), linked.ahead)

    def row(self, steps: int) -> Mapping[str, Any] | None:
        return self._local.row(steps)
