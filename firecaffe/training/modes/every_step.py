"""Steps that all ranks make together: batch, forward, backward, sum, update.

A rank computes its micro-batches one after the other. Their gradients are added in the order of the
micro-batch tree. During the last backward they are sent to the other ranks, bucket by bucket. Once
all sums are known, every rank that updates uses the same numbers.

The host never waits for a GPU here. A step's outcome is read once the device has computed it: on a
CPU at once, before the update; on a GPU after the next step was queued.

Ranks may be measured, and their shares of micro-batches rebalanced. A rank's time of a step ends
when its last gradient is ready. It includes waits for its data, because a rank with less to compute
has less to read. Later waits for other ranks and the update do not count, because a smaller share
would not shorten them. Ranks that hold one model together are a row. Rows receive shares, and waits
within a row count: a row is only as fast as its ranks together.
"""

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

import torch
from torch import Tensor, optim

from firecaffe.cluster.agree import gather_text
from firecaffe.cluster.group import Group
from firecaffe.data.batches import PrefetchedBatches, TrainBatches
from firecaffe.exchange.leaves import Shares
from firecaffe.gradients.reducer import GradientReducer
from firecaffe.recipe.run import Run
from firecaffe.recipe.worker_numbers import RankLayout, layout_of, rows_of
from firecaffe.synchrony.shares import next_shares
from firecaffe.training.forward import Forward
from firecaffe.training.holdings.holding import Holding
from firecaffe.training.outcome import (
    VOTES,
    Outcome,
    Spent,
    StepMarks,
    StepResult,
    Timings,
    Votes,
    pack_votes,
)
from firecaffe.training.parallel.mesh import Mesh
from firecaffe.training.updates.every_rank import Applier, EveryRank
from firecaffe.training.updates.spread import LossScale


class EveryStep:
    def __init__(
        self,
        holding: Holding,
        update: EveryRank,
        batches: TrainBatches,
        leaves: Sequence[int],
        momentum: Callable[[int], float | None] = lambda _: None,
        is_measured: Callable[[int], bool] = lambda _: False,
    ) -> None:
        """Compute `leaves` in this order (see `Route.order`). A momentum of None changes nothing.

        `is_measured` says whether a step, counted from 0, measures the norms of gradients.
        """
        self.holding, self.update, self.batches = holding, update, batches
        self.leaves, self.momentum, self._is_measured = leaves, momentum, is_measured

    @property
    def behind(self) -> int:
        return 1 if self.update.queue.is_async else 0

    @property
    def advice(self) -> str:
        return ""

    def run(self, step: int, learning_rate: float, vote: Callable[[], Votes] = Votes) -> Outcome:
        """Train step `step`, counted from 0, and leave every rank with the same weights.

        `vote` is called before the last backward. NotFiniteError leaves the weights as before the
        step; on a GPU, reading the outcome raises it instead.
        """
        holding, update, queue = self.holding, self.update, self.update.queue
        times = StepMarks(queue, len(self.leaves), self._spent)
        samples = self.batches.order.samples_in_step(step)
        weight = samples / self.batches.order.micro_batch_size
        holding.begin_step()
        update.begin(weight, self.leaves, partial(self._counts, vote), self._is_measured(step))
        fetch = times.timed(partial(self.batches.train_batch, step))
        for ready in holding.run(step, self.leaves, fetch):
            update.add(ready)
            del ready  # its gradients of parts may be as large as the weights
        totals = update.sums()
        times.set_sums(totals)
        checked = update.check(totals, VOTES).to_host(queue)
        outcome = Outcome(step, samples, weight, holding.forward.task.counted, checked, times)
        if update.is_known:
            outcome.check_finite()
        update.apply(step, learning_rate, self.momentum(step))
        holding.set_buffers(totals.tail[1:], weight)
        times.end(update.exchanges)
        return outcome

    def set_shares(self, shares: Shares, order: Callable[[range], list[int]], own: range) -> None:
        """Give ranks other micro-batches from the next step on, each share in `order`."""
        self.update.set_shares(shares)
        self.holding.set_shares(shares, order)
        self.leaves = order(own)

    def _counts(self, vote: Callable[[], Votes]) -> Tensor:
        forward = self.holding.forward
        return torch.cat([self.holding.counts(), pack_votes(vote(), forward.device)])

    def _spent(self) -> Spent:
        return self.holding.spent().with_parts(self.update.parts_s)


def empty_counts(forward: Forward) -> Tensor:
    """Return zeros in the form of a rank's counts of a step: the task's counts, then its votes."""
    return torch.cat([forward.zero_counts(), torch.zeros(VOTES, device=forward.device)])


def steps_of_whole(
    forward: Forward,
    batches: TrainBatches,
    optimizer: optim.Optimizer,
    reducer: GradientReducer,
    leaves: Sequence[int],
    clip_gradients: float = 0.0,
) -> EveryStep:
    """Make steps of ranks that hold and update the whole model, for measurements."""
    holding = Holding(forward, forward.model, reducer.exchange.world)
    applier = Applier(optimizer, LossScale(forward.scaler, optimizer, forward.device))
    update = EveryRank(holding, applier, holding.spread(), clip_gradients).connect(reducer)
    return EveryStep(holding, update, batches, leaves)


@dataclass(frozen=True)
class Change:
    """A change of shares after `step` steps, and each rank's median seconds per micro-batch."""

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
class ShareBalancer:
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
    use: Callable[[Shares, range, int], None] = lambda *_: None
    """Takes all shares and this rank's own, for the steps after the given one."""
    changes: list[Change] = field(default_factory=list)
    _measured: list[float] = field(default_factory=list)

    def add(self, result: StepResult) -> None:
        if result.samples == self.full_step:
            self._measured.append(own_seconds(result.timings))

    def is_due(self, done: int) -> bool:
        return done % self.every == 0

    def decide(self, done: int) -> str:
        """Decide the next shares; return a line about a change. All call it after one step."""
        if not self._measured:  # then none on any rank
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
        self.use(self.shares, self.own_share, done)
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

    @property
    def row(self) -> dict[str, object]:
        return {
            "micro_batches_by_rank": self.micro_batches_by_rank,
            "changes": [asdict(change) for change in self.changes],
        }


class FixedShares:
    row = None

    def add(self, result: StepResult) -> None: ...

    def is_due(self, done: int) -> bool:
        return False

    def decide(self, done: int) -> str:
        return ""


def measured_shares(
    run: Run, mesh: Mesh, step: EveryStep, ahead: PrefetchedBatches
) -> FixedShares | ShareBalancer:
    synchrony = run.recipe.synchrony
    layout = layout_of(run.recipe.parallel, mesh.world.world_size)
    if not synchrony.measures_shares or layout.data == 1:
        return FixedShares()
    order = partial(run.route.order, run.num_leaves)

    def use(shares: Shares, own: range, done: int) -> None:
        step.set_shares(shares, order, own)
        ahead.go_on(step.leaves if ahead.leaves else [], done)

    return ShareBalancer(
        world=mesh.world,
        layout=layout,
        num_leaves=run.num_leaves,
        full_step=run.recipe.train.global_batch_size,
        every=synchrony.shares_every,
        shares=run.shares,
        level=run.recipe.exchange.level,
        use=use,
    )


def shares_in_rows(rounds: Shares, size: int) -> Shares:
    """Divide each row's `rounds`, of `size` micro-batches, among its ranks: one each per round."""
    return tuple(
        range(start, start + len(row))
        for row in rounds
        for start in range(row.start * size, row.stop * size, len(row))
    )


def own_seconds(timings: Timings) -> float:
    """Return a rank's seconds per micro-batch in a step, including its waits for its row."""
    in_row_s = (timings.idle_s or 0.0) + (timings.activations_s or 0.0)
    return (timings.data_s + timings.compute_s + in_row_s) / timings.micro_batches
