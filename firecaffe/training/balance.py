"""Balanced shares while a training goes on: measured by each rank, decided by all together.

A rank's own time of a step is that until its last gradient is there: reading its samples, forward
and backward. Waiting for its data is part of it, for who has less to compute has less to read. What
comes after is waiting for others and the update, which a smaller share would not make shorter.

Ranks that hold one model together are a row, and rows are given shares. What a rank waits for the
others of its row until then counts too: a row is as fast as it is together.
"""

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

from firecaffe.cluster.agree import gather_text
from firecaffe.cluster.group import Group
from firecaffe.data.train_batches import BatchesAhead
from firecaffe.exchange.leaves import Shares
from firecaffe.recipe.parallel import Layout, layout_of, rows_of
from firecaffe.recipe.run import Run
from firecaffe.synchrony.config import MEASURED
from firecaffe.synchrony.shares import next_shares
from firecaffe.training.modes.every_step import EveryStep
from firecaffe.training.outcome import StepResult
from firecaffe.training.parallel.mesh import Mesh
from firecaffe.training.times import Timings


@dataclass(frozen=True)
class Change:
    """A change of shares, for a run's record."""

    step: int
    """The number of steps that were done."""
    micro_batches_by_rank: list[int]
    """The numbers from then on."""
    seconds_by_rank: list[float]
    """What each rank took for a micro-batch before; the median over the steps since the decision
    before."""

    def line(self, before: Sequence[int], row_size: int) -> str:
        """The change for people, of each row. before: the numbers by rank."""
        now = ", ".join(map(str, self.micro_batches_by_rank[::row_size]))
        then = ", ".join(map(str, before[::row_size]))
        seconds = rows_of(self.seconds_by_rank, row_size)
        taken = ", ".join(f"{max(each) * 1e3:.3g}" for each in seconds)
        return (
            f"shares from step {self.step + 1} on: {now} micro-batches (before: {then}); "
            f"one takes {taken} ms"
        )


@dataclass
class Balance:
    """Decides how many micro-batches each rank computes, the same on all ranks."""

    world: Group
    layout: Layout
    num_leaves: int
    full_step: int
    """The samples of a full step; shorter ones, at the end of an epoch, are not measured."""
    every: int
    """The number of steps between two decisions."""
    shares: Shares
    """Of those that share out the micro-batches of a step: rows, or ranks with samples of their
    own."""
    level: int = 0
    """Of the nodes of the micro-batch tree that stay whole: a codec's."""
    changes: list[Change] = field(default_factory=list)
    _measured: list[float] = field(default_factory=list)

    def add(self, result: StepResult) -> None:
        """Takes the measurement of a step that has the current shares."""
        if result.samples == self.full_step:
            self._measured.append(own_seconds(result.timings))

    def is_due(self, done: int) -> bool:
        """Whether ranks are to decide after so many steps."""
        return done % self.every == 0

    def decide(self, done: int) -> str:
        """Decides about the next steps; all ranks call it after the same step. Returns what is to
        be said if shares change, else nothing.

        Raises: PeerLostError.
        """
        if not self._measured:  # of all ranks alike
            return ""
        own = statistics.median(self._measured)
        self._measured = []
        seconds = [float(text) for text in gather_text(self.world, json.dumps(own))]
        of_rows = [max(row) for row in rows_of(seconds, self.layout.model)]
        before, counts = self.shares, self.micro_batches_by_rank
        each, level = self.layout.at_a_time, self.level
        rounds = next_shares(self.num_leaves // (each << level), of_rows, self._rounds)
        in_nodes = shares_in_rows(rounds, each)
        self.shares = tuple(range(one.start << level, one.stop << level) for one in in_nodes)
        if self.shares == before:
            return ""
        self.changes.append(Change(done, self.micro_batches_by_rank, seconds))
        return self.changes[-1].line(counts, self.layout.model)

    @property
    def own_share(self) -> range:
        """The micro-batches of this rank."""
        return self.shares[self.world.rank // self.layout.ranks_of_a_sharer]

    @property
    def micro_batches_by_rank(self) -> list[int]:
        """How many micro-batches each rank computes now."""
        each = self.layout.ranks_of_a_sharer
        return [len(share) for share in self.shares for _ in range(each)]

    @property
    def _rounds(self) -> Shares:
        """The shares of rows, in as many micro-batches as each computes at a time, or nodes."""
        each = self.layout.at_a_time
        unit = each << self.level
        rows = rows_of(self.shares, each)
        return tuple(range(row[0].start // unit, row[-1].stop // unit) for row in rows)

    def as_dict(self) -> dict[str, object]:
        """What a run's record says of it."""
        return {
            "micro_batches_by_rank": self.micro_batches_by_rank,
            "changes": [asdict(change) for change in self.changes],
        }


@dataclass(frozen=True)
class MeasuredShares:
    """Shares that change between steps of all ranks together."""

    balance: Balance
    step: EveryStep
    ahead: BatchesAhead
    """Where its batches come from."""
    order: Callable[[range], list[int]]
    """That in which a rank computes a share."""

    def decide(self, done: int) -> str:
        """As `Balance.decide`; ranks have the shares of the steps after `done` then."""
        said = self.balance.decide(done)
        if said:
            self.step.share_out(self.balance.shares, self.order, self.balance.own_share)
            self.ahead.go_on(self.step.leaves if self.ahead.leaves else [], done)
        return said


def measured_shares(
    run: Run, mesh: Mesh, step: EveryStep, ahead: BatchesAhead
) -> MeasuredShares | None:
    """What decides about shares, if they are measured and there are several."""
    words = run.recipe.synchrony
    layout = layout_of(run.recipe.parallel, mesh.world.world_size)
    if words.shares != MEASURED or layout.data == 1:
        return None
    full_step = run.recipe.train.global_batch_size
    at_first = words.shares_every, run.shares, run.recipe.exchange.level
    own = Balance(mesh.world, layout, run.num_leaves, full_step, *at_first)
    return MeasuredShares(own, step, ahead, partial(run.route.order, run.num_leaves))


def shares_in_rows(rounds: Shares, size: int) -> Shares:
    """The shares of the ranks of rows that each compute `size` micro-batches at a time, a rank one.
    rounds: how often each row does so.
    """
    return tuple(
        range(start, start + len(row))
        for row in rounds
        for start in range(row.start * size, row.stop * size, len(row))
    )


def own_seconds(timings: Timings) -> float:
    """What a rank took for each of its micro-batches in a step, with waits for its row."""
    in_row_s = (timings.idle_s or 0.0) + (timings.activations_s or 0.0)
    return (timings.data_s + timings.compute_s + in_row_s) / timings.micro_batches
