"""Measure how fast ranks are during a training, and rebalance their shares of micro-batches.

A rank's time of a step ends when its last gradient is ready. It includes waits for its data,
because a rank with less to compute has less to read. Later waits for other ranks and the update do
not count, because a smaller share would not shorten them. Ranks that hold one model together are a
row. Rows receive shares, and waits within a row count: it is only as fast as its ranks together.
"""

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

from firecaffe.cluster.agree import gather_text
from firecaffe.cluster.group import Group
from firecaffe.data.batches import BatchesAhead
from firecaffe.exchange.leaves import Shares
from firecaffe.recipe.run import Run
from firecaffe.recipe.worker_numbers import RankLayout, layout_of, rows_of
from firecaffe.synchrony.config import MEASURED
from firecaffe.synchrony.shares import next_shares
from firecaffe.training.modes.every_step import EveryStep
from firecaffe.training.outcome import StepResult
from firecaffe.training.parallel.mesh import Mesh
from firecaffe.training.times import Timings


@dataclass(frozen=True)
class Change:
    """A change after `step` steps. Seconds are each rank's median for a micro-batch before it."""

    step: int
    micro_batches_by_rank: list[int]
    seconds_by_rank: list[float]

    def line(self, before: Sequence[int], row_size: int) -> str:
        now = ", ".join(map(str, self.micro_batches_by_rank[::row_size]))
        then = ", ".join(map(str, before[::row_size]))
        by_row = rows_of(self.seconds_by_rank, row_size)
        taken = ", ".join(f"{max(row) * 1e3:.3g}" for row in by_row)
        return (
            f"shares from step {self.step + 1} on: {now} micro-batches (before: {then}); "
            f"one takes {taken} ms"
        )


@dataclass
class Balance:
    """Decides how many micro-batches each rank computes; all ranks decide the same."""

    world: Group
    layout: RankLayout
    num_leaves: int
    full_step: int
    """Samples of a full step. Shorter steps, at the end of an epoch, are not measured."""
    every: int
    shares: Shares
    """The micro-batches of each sharer: a row, or a rank with samples of its own."""
    level: int = 0
    """The level of the micro-batch tree whose nodes stay whole, because a codec encodes them."""
    changes: list[Change] = field(default_factory=list)
    _measured: list[float] = field(default_factory=list)

    def add(self, result: StepResult) -> None:
        if result.samples == self.full_step:
            self._measured.append(own_seconds(result.timings))

    def is_due(self, done: int) -> bool:
        return done % self.every == 0

    def decide(self, done: int) -> str:
        """Decide the next steps' shares. All ranks call it after the same step.

        Returns the line about a change, or an empty string. Raises: PeerLostError.
        """
        if not self._measured:  # so on all ranks
            return ""
        local_s = statistics.median(self._measured)
        self._measured = []
        seconds = [float(text) for text in gather_text(self.world, json.dumps(local_s))]
        of_rows = [max(row) for row in rows_of(seconds, self.layout.model)]
        before, counts = self.shares, self.micro_batches_by_rank
        at_a_time, level = self.layout.at_a_time, self.level
        rounds = next_shares(self.num_leaves // (at_a_time << level), of_rows, self._rounds)
        in_nodes = shares_in_rows(rounds, at_a_time)
        self.shares = tuple(range(one.start << level, one.stop << level) for one in in_nodes)
        if self.shares == before:
            return ""
        self.changes.append(Change(done, self.micro_batches_by_rank, seconds))
        return self.changes[-1].line(counts, self.layout.model)

    @property
    def own_share(self) -> range:
        return self.shares[self.world.rank // self.layout.ranks_of_a_sharer]

    @property
    def micro_batches_by_rank(self) -> list[int]:
        num_ranks = self.layout.ranks_of_a_sharer
        return [len(share) for share in self.shares for _ in range(num_ranks)]

    @property
    def _rounds(self) -> Shares:
        # In units of what a row computes at a time, or of whole nodes.
        at_a_time = self.layout.at_a_time
        unit = at_a_time << self.level
        rows = rows_of(self.shares, at_a_time)
        return tuple(range(row[0].start // unit, row[-1].stop // unit) for row in rows)

    def as_dict(self) -> dict[str, object]:
        return {
            "micro_batches_by_rank": self.micro_batches_by_rank,
            "changes": [asdict(change) for change in self.changes],
        }


class FixedShares:
    """Shares that stay as they are."""

    row = None

    def add(self, result: StepResult) -> None: ...

    def is_due(self, done: int) -> bool:
        return False

    def decide(self, done: int) -> str:
        return ""


@dataclass(frozen=True)
class MeasuredShares:
    """Shares that change between steps, if all ranks make each step together."""

    balance: Balance
    step: EveryStep
    ahead: BatchesAhead
    order: Callable[[range], list[int]]

    @property
    def row(self) -> dict[str, object]:
        return self.balance.as_dict()

    def add(self, result: StepResult) -> None:
        self.balance.add(result)

    def is_due(self, done: int) -> bool:
        return self.balance.is_due(done)

    def decide(self, done: int) -> str:
        """Call `Balance.decide`, and use the new shares in the steps after `done`."""
        said = self.balance.decide(done)
        if said:
            self.step.share_out(self.balance.shares, self.order, self.balance.own_share)
            self.ahead.go_on(self.step.leaves if self.ahead.leaves else [], done)
        return said


def measured_shares(
    run: Run, mesh: Mesh, step: EveryStep, ahead: BatchesAhead
) -> FixedShares | MeasuredShares:
    """Return shares that change if the recipe measures them and there are several rows."""
    synchrony = run.recipe.synchrony
    layout = layout_of(run.recipe.parallel, mesh.world.world_size)
    if synchrony.shares != MEASURED or layout.data == 1:
        return FixedShares()
    full_step = run.recipe.train.global_batch_size
    at_first = synchrony.shares_every, run.shares, run.recipe.exchange.level
    balance = Balance(mesh.world, layout, run.num_leaves, full_step, *at_first)
    return MeasuredShares(balance, step, ahead, partial(run.route.order, run.num_leaves))


def shares_in_rows(rounds: Shares, size: int) -> Shares:
    """Share out each row's `rounds`, of `size` micro-batches, to its ranks: one each at a time."""
    return tuple(
        range(start, start + len(row))
        for row in rounds
        for start in range(row.start * size, row.stop * size, len(row))
    )


def own_seconds(timings: Timings) -> float:
    """Return a rank's seconds for each of its micro-batches in a step, with waits for its row."""
    in_row_s = (timings.idle_s or 0.0) + (timings.activations_s or 0.0)
    return (timings.data_s + timings.compute_s + in_row_s) / timings.micro_batches
