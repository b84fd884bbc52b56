"""Steps of replicas that train on their own, their sums, and the averages between them.

Nothing is exchanged between averages. So the sums of a step are sent with the average that follows
it, or earlier if they are read. Until then each rank has its own part.

A step is all micro-batches of the global batch, as in other modes. Of these M leaves, replica r of
R takes [r M / R, (r + 1) M / R), adds their gradients by the tree over them, and makes its own
update. A replica without samples, at the end of an epoch, makes none. Every rank hosts consecutive
replicas and trains them one after the other in the same network.

For an average of a fragment, replica r is leaf r of the tree. With x the weights that all replicas
began with, it sends x - x_r through the exchange, as gradients are sent. The tail has the changes
of its buffers, and the losses of its steps since the last average of any fragment. So an average
costs as much as a gradient of the same parameters, with any exchange or codec, and its bits are the
same on any number of workers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, optim

from firecaffe.cluster.agree import gather_json
from firecaffe.cluster.group import Group
from firecaffe.data.batches import PrefetchedBatches
from firecaffe.errors import NotFiniteError
from firecaffe.exchange.leaves import tree_sum
from firecaffe.gradients.reducer import GradientReducer
from firecaffe.gradients.totals import Totals
from firecaffe.solvers.update_rules import Outer
from firecaffe.synchrony.rounds import Round, Rounds
from firecaffe.training.forward import Forward
from firecaffe.training.modes.every_step import EveryStep
from firecaffe.training.modes.replicas import Fragment, Moments, Replica, Replicas, copy
from firecaffe.training.outcome import (
    VOTES,
    FetchBatch,
    Outcome,
    StepMarks,
    StepResult,
    Votes,
    pack_votes,
)
from firecaffe.training.updates.every_rank import Applier, EveryRank
from firecaffe.training.updates.spread import Found, Spread


@dataclass
class LocalOutcome:
    """The outcome of a local step: this rank's part, and later that of all ranks."""

    losses: dict[int, Tensor]
    """The sum of the losses of each of this rank's replicas, shape (1,), by number."""
    counts: Tensor
    """The task's counts, and the number of replicas here whose gradient is not finite."""
    times: StepMarks
    replicas: int
    outcome_of: Callable[[Found], Outcome]
    ask: Callable[[], None]
    """Makes all ranks sum what is not summed yet."""
    summed: Outcome | None = None

    def read(self, look: Callable[[], None] = lambda: None) -> StepResult:
        if self.summed is None:
            self.ask()
        assert self.summed is not None
        return self.summed.read(look)

    def take(self, loss: Tensor, counts: Tensor, votes: Tensor) -> None:
        """Set the sums over all ranks. Raises: NotFiniteError, on all ranks."""
        sums = torch.cat([loss.reshape(1), counts[:-1], votes])
        checked = Found(sums, torch.ones(1, dtype=torch.bool), torch.zeros(()), ())
        self.summed = outcome = self.outcome_of(checked)
        if broken := int(counts[-1]):
            error = NotFiniteError(
                f"the loss is {outcome.loss:.4g}; the gradients of {broken} of {self.replicas} "
                "replicas are not finite"
            )
            error.step = outcome.step + 1
            raise error
        outcome.check_finite()


class LocalSums:
    def __init__(self, longest: int, counted: int, device: torch.device) -> None:
        self._longest, self._row, self._device = longest, counted + 1, device
        self.waiting: list[LocalOutcome] = []

    def take_waiting(self) -> list[LocalOutcome]:
        taken, self.waiting = self.waiting, []
        return taken

    def zero_losses(self) -> Tensor:
        return torch.zeros(self._longest, device=self._device)

    def zero_counts(self) -> Tensor:
        """Return zeros for a rank's counts: a row for each step before an average, then votes."""
        return torch.zeros(self._longest * self._row + VOTES, device=self._device)

    def zero_row(self) -> Tensor:
        return torch.zeros(self._row, device=self._device)

    def losses(self, number: int) -> Tensor:
        losses = self.zero_losses()
        if self.waiting:
            losses[: len(self.waiting)] = torch.cat(
                [outcome.losses[number] for outcome in self.waiting]
            )
        return losses

    def counts(self, votes: Tensor) -> Tensor:
        counts = self.zero_counts()
        rows = [outcome.counts for outcome in self.waiting]
        if rows:
            counts[: len(rows) * self._row] = torch.cat(rows)
        counts[-VOTES:] = votes
        return counts

    def settle(self, sent: Sequence[LocalOutcome], losses: Tensor, counts: Tensor) -> None:
        rows = counts[:-VOTES].reshape(self._longest, self._row)
        for place, outcome in enumerate(sent):
            outcome.take(losses[place], rows[place], counts[-VOTES:])

    def sum_now(self, sharers: Group) -> None:
        """Sum what waits, over all ranks with replicas. Raises: NotFiniteError, PeerLostError."""
        waiting = self.take_waiting()
        local_steps = [
            [[loss.item() for _, loss in sorted(step.losses.items())], step.counts.tolist()]
            for step in waiting
        ]
        for outcome, *of_ranks in zip(waiting, *gather_json(sharers, local_steps), strict=True):
            losses = [torch.tensor(loss) for of_rank, _ in of_ranks for loss in of_rank]
            counts = torch.tensor([counted for _, counted in of_ranks]).sum(0)
            outcome.take(tree_sum(losses, torch.add), counts, torch.zeros(VOTES))


@dataclass
class Average:
    fragment: Fragment
    reducer: GradientReducer
    forward: Forward
    replicas: Replicas
    order: Sequence[int]
    """This rank's replicas, in the order in which the reducer adds them."""
    moments: Moments
    outer: Outer
    forgets: bool
    """Whether the replicas' optimizers are reset after an average."""
    applier: Applier
    """The update of synchronous steps; it has the constraints and the moving average."""

    @torch.no_grad()
    def begin(self, losses: dict[int, Tensor], counts: Tensor) -> None:
        """Start sending the differences, the losses of this rank's replicas, and its counts."""
        by_number = {replica.number: replica for replica in self.replicas.own}
        self.reducer.begin_step(self.reducer.num_leaves, self.order, lambda: counts)
        self.forward.buffers.begin_step()
        for number in self.order:
            replica = by_number[number]
            for name, parameter in self.fragment.named.items():
                parameter.grad = parameter - replica.weights[name]
            changes = self._changes(replica) if self.fragment.has_buffers else []
            tail = [losses[number], *self.moments.of(replica), *changes]
            self.reducer.add(number, None, tail)

    def _changes(self, replica: Replica) -> list[Tensor]:
        buffers = self.forward.buffers
        copy(self.replicas.model.buffers(), replica.buffers.values())
        changes = buffers.take(replica.number, 1.0)
        buffers.begin_micro_batch()  # restores the network's buffers
        return changes

    def finish(self) -> Totals:
        """Wait for the mean difference, the new `grad` of the fragment. Raises: PeerLostError."""
        for parameter in self.replicas.named.values():
            parameter.grad = None
        return self.reducer.finish_step()

    @torch.no_grad()
    def apply(self, totals: Totals, steps: range, learning_rate: float) -> None:
        """Update the network's average. `steps` are those since the fragment's last average."""
        count, first = self.reducer.num_leaves, 1 + len(self.moments.keys)
        self.outer.step(learning_rate)
        if self.applier.ema is not None:
            self.applier.ema.update_after(steps, self.fragment.named)
        # A codec or rounding may have changed zeros, or made shared weights differ.
        self.applier.restrict(self.replicas.named)
        if self.fragment.has_buffers:
            self.forward.buffers.begin_step()
            self.forward.buffers.finish_step(totals.tail[first:], count)
        means = [total / count for total in totals.tail[1:first]]
        for replica in self.replicas.own:
            self.moments.give(replica, means)
        for parameter in self.fragment.named.values():
            parameter.grad = None
        if self.forgets:
            self.replicas.forget(self.fragment)


@dataclass
class UnderWay:
    round: Round
    sent: list[LocalOutcome]


@dataclass
class LocalStepper:
    """Runs steps on this rank, the first ones as synchronous steps; implements `Mode`."""

    synchronous: EveryStep
    ahead: PrefetchedBatches
    sharers: Group
    rounds: Rounds
    replicas: Replicas
    averages: Sequence[Average]
    updates: Mapping[int, EveryRank]
    """The updates of this rank's replicas, by number. Each sums on this rank alone."""
    optimizer: optim.Optimizer
    spread: Spread
    leaves: list[int]
    num_replicas: int
    sums: LocalSums
    advice: str
    _under_way: UnderWay | None = field(default=None, init=False)
    _have_parted: bool = field(default=False, init=False)

    @property
    def behind(self) -> int:
        if not self._have_parted:
            return self.synchronous.behind
        sent = [] if self._under_way is None else self._under_way.sent
        return len(sent) + len(self.sums.waiting)

    def run(
        self, step: int, learning_rate: float, vote: Callable[[], Votes] = Votes
    ) -> Outcome | LocalOutcome:
        """Train a step, as `Mode.run`; `vote` is called, and errors raised, before an average."""
        if step < self.rounds.synchronous:
            return self.synchronous.run(step, learning_rate, vote)
        self._have_parted = True
        if step == self.rounds.synchronous:
            self.replicas.inherit(self.optimizer)
            self.replicas.join()
            if self.ahead.leaves and self.ahead.leaves != self.leaves:
                self.ahead.go_on(self.leaves, step)
        outcome, done = self._train(step, learning_rate), step + 1
        self.sums.waiting.append(outcome)
        if self._under_way is not None and self._under_way.round.applied == done:
            self._apply(self._under_way, outcome, learning_rate)
        for round_ in self.rounds.taken(done):
            average = self.averages[round_.fragment]
            votes = pack_votes(vote(), self.synchronous.holding.forward.device)
            losses = {
                replica.number: self.sums.losses(replica.number) for replica in self.replicas.own
            }
            average.begin(losses, self.sums.counts(votes))
            self._under_way = UnderWay(round_, self.sums.take_waiting())
            if round_.applied == done:
                self._apply(self._under_way, outcome, learning_rate)
            else:
                self.replicas.remember(average.fragment)
        self.replicas.is_apart = not self.rounds.are_together(done)
        outcome.times.end()
        return outcome

    def _train(self, step: int, learning_rate: float) -> LocalOutcome:
        order, holding = self.ahead.order, self.synchronous.holding
        queue = self.synchronous.update.queue
        times = StepMarks(queue, len(self.leaves), holding.spent)
        fetch = times.timed(partial(self.synchronous.batches.train_batch, step))
        losses: dict[int, Tensor] = {}
        counts = self.sums.zero_row()
        with self.replicas.average_restored():
            for replica in self.replicas.own:
                self.replicas.lend(replica)
                losses[replica.number], counted = self._update(replica, step, learning_rate, fetch)
                counts += counted
                self.replicas.take_back(replica)
        computed = queue.mark()
        times.set_sums(Totals((), counts, computed, computed, ()))
        samples = order.samples_in_step(step)
        weight, metrics = samples / order.micro_batch_size, holding.forward.task.counted
        return LocalOutcome(
            losses=losses,
            counts=counts,
            times=times,
            replicas=self.num_replicas,
            outcome_of=partial(Outcome, step, samples, weight, metrics, times=times),
            ask=partial(self.sums.sum_now, self.sharers),
        )

    def _update(
        self, replica: Replica, step: int, learning_rate: float, fetch: FetchBatch
    ) -> tuple[Tensor, Tensor]:
        holding, update = self.synchronous.holding, self.updates[replica.number]
        order = self.ahead.order
        leaves_per_replica = update.reducer.num_leaves
        first = replica.number * leaves_per_replica
        leaves = range(first, first + leaves_per_replica)
        samples = sum(order.samples_in_leaf(step, leaf) for leaf in leaves)
        weight = samples / order.micro_batch_size
        update.begin(weight, range(leaves_per_replica), holding.counts)
        holding.begin_step(leaves[0])
        for place, ready in enumerate(holding.run(step, leaves, fetch)):
            if samples:
                update.add(replace(ready, leaf=place))
        if not samples:
            return torch.zeros(1, device=holding.forward.device), self.sums.zero_row()
        totals = update.sums()
        checked = update.check(totals, counted=0)
        update.apply(step, learning_rate, self.synchronous.momentum(step))
        holding.set_buffers(totals.tail[1:], weight)
        is_fit = checked.is_finite.all() & checked.norm.isfinite() | checked.may_overflow
        sums = checked.sums.to(holding.forward.device)
        broken = (~is_fit).to(sums).reshape(1)
        return sums[:1].clone(), torch.cat([sums[1:], broken])

    def _apply(self, under_way: UnderWay, outcome: LocalOutcome, learning_rate: float) -> None:
        average, round_ = self.averages[under_way.round.fragment], under_way.round
        totals = average.finish()
        outcome.times.set_sums(totals)
        self._under_way = None
        counts = totals.counts.cpu()
        votes = self.spread.total(counts[-VOTES:])
        counts = torch.cat([counts[:-VOTES], votes])
        self.sums.settle(under_way.sent, totals.tail[0].cpu(), counts)
        average.apply(totals, range(round_.first, round_.stop), learning_rate)
        if round_.applied == round_.stop:
            self.replicas.take(average.fragment)
        else:
            self.replicas.follow(average.fragment)
