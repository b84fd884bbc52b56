"""One step: batch, forward, backward, sum, update.

A worker takes its micro-batches one after the other. Their gradients are added in the order of the
micro-batch tree; during the last one's backward they leave for the other workers, bucket by bucket.
When all sums are there, every worker makes the same update.

The host is never to wait for a GPU here. What a step came to is read when the device has got there:
on a CPU at once, before the update; on a GPU after the next step was queued.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn, optim

from firecaffe.data import Batch, SampleOrder
from firecaffe.gradients.reducer import GradientReducer
from firecaffe.gradients.totals import Totals
from firecaffe.solvers.optimizer import set_rate
from firecaffe.training.constraint import Constraint
from firecaffe.training.ema import Ema
from firecaffe.training.forward import Forward
from firecaffe.training.outcome import Outcome, Votes
from firecaffe.training.parallel.overflow import unscale
from firecaffe.training.parallel.step import Rows

VOTES = 2
"""The number of votes: to stop, and to save."""


class TrainBatches(Protocol):
    """A source of micro-batches: `data.Batches`, or one that fetches them ahead."""

    @property
    def order(self) -> SampleOrder: ...

    def train_batch(self, step: int, leaf: int) -> Batch: ...


@dataclass
class Stepper:
    """Runs steps on this rank."""

    forward: Forward
    batches: TrainBatches
    optimizer: optim.Optimizer
    reducer: GradientReducer
    leaves: Sequence[int]
    """This worker's micro-batches of a step, in the order in which they are computed; see
    `Route.order`."""
    clip_gradients: float = 0.0
    """The largest norm of the gradient; 0 does not clip."""
    momentum: Callable[[int], float | None] = lambda _: None
    """The momentum of a step, counted from 0, if the policy moves it."""
    ema: Ema | None = None
    """The moving average of the weights, if one is kept."""
    rows: Rows | None = None
    """The ranks that hold one model with this one, if it is split."""
    constraints: Sequence[Constraint] = ()
    """What the weights have to obey, in the order in which they act."""

    @property
    def behind(self) -> int:
        """The number of steps, the last ones, whose outcome is not there yet."""
        return 1 if self.reducer.queue.works_behind else 0

    def run(self, step: int, learning_rate: float, vote: Callable[[], Votes] = Votes) -> Outcome:
        """Trains step `step`, counted from 0, and leaves every rank with the same weights.

        vote: asked before the last backward.

        Raises: PeerLostError. NotFiniteError on all ranks, which keep the weights from before the
        step; on a GPU the outcome raises it when it is read.
        """
        queue, start = self.reducer.queue, self.reducer.queue.mark()
        samples = self.batches.order.samples_in_step(step)
        weight = samples / self.forward.config.micro_batch_size
        self.reducer.begin_step(weight)
        self.forward.begin_step()
        if self.rows is not None:
            self.rows.begin_step()
        waits = []
        for number, leaf in enumerate(self.leaves):
            asked = queue.mark()
            batch = self.batches.train_batch(step, leaf)
            waits.append((asked, queue.mark()))
            if self.rows is not None:
                self.rows.begin(step, number)
            loss, tail = self.forward(*batch, step, leaf)
            if leaf != self.leaves[-1]:
                self.reducer.add(leaf, loss, tail)
            else:
                counts = torch.cat([self.forward.counts, ballot(vote(), self.forward.device)])
                self.reducer.add_last(leaf, loss, tail, counts)
            if self.rows is not None:
                self.rows.end(step, number, partial(self._apply, step, learning_rate))
        totals = self.reducer.finish_step()
        finite: Tensor = self._finite()
        names: Sequence[str] = self.reducer.names
        if self.rows is not None:
            finite, names = self.rows.finish_step(step, finite, names)
        is_finite = queue.to_host(finite)  # before the norm may scale it
        norm = queue.to_host(self._scale_gradients())
        sums = queue.to_host(torch.cat([totals.tail[0], totals.counts]))
        outcome = partial(
            self._outcome(),
            step=step,
            samples=samples,
            weight=weight,
            metrics=self.forward.task.counted,
            sums=sums,
            is_finite=is_finite,
            norm=norm,
            names=names,
            overflows=self.forward.scaler.is_enabled(),
            totals=totals,
            start=start,
            waits=waits,
            micro_batches=len(self.leaves),
        )
        if self.rows is not None:
            sums[-VOTES:] = self.rows.agree(outcome(end=queue.mark()), sums[-VOTES:])
        elif not queue.works_behind:
            outcome(end=totals.summed).check_finite()
        self.update(step, learning_rate, totals, weight)
        return outcome(end=queue.mark())

    def _finite(self) -> Tensor:
        """Whether each parameter's mean gradient is finite: bool, shape (parameters,)."""
        return self.reducer.finite()

    def _outcome(self) -> Callable[..., Outcome]:
        """What makes the step's outcome."""
        return Outcome if self.rows is None else self.rows.outcome()

    def update(self, step: int, learning_rate: float, totals: Totals, weight: float) -> None:
        """Updates weights, their moving average and buffers from the sums of a step."""
        self._apply(step, learning_rate)
        if self.ema is not None:
            self.ema.update(step)
            for each in self.constraints:
                each.restrict(self.ema.average)
        self.forward.buffers.finish_step(totals.tail[1:], weight)

    def _apply(self, step: int, learning_rate: float) -> None:
        """Updates what has gradients."""
        set_rate(self.optimizer, learning_rate, self.momentum(step))
        for each in self.constraints:
            each.before_update(step)
        self.forward.scaler.step(self.optimizer)
        self.forward.scaler.update()
        for each in self.constraints:
            each.after_update(step)

    def _scale_gradients(self) -> Tensor:
        """Undoes the loss scale, and clips. Returns the gradient's norm; 0 if none is clipped."""
        row = None if self.rows is None else self.rows.group
        unscale(self.forward.scaler, self.optimizer, row)
        if not self.clip_gradients:
            return torch.zeros((), device=self.forward.device)
        parameters = self.forward.model.parameters()
        if self.rows is None:
            return nn.utils.clip_grad_norm_(parameters, self.clip_gradients, foreach=True)
        norm = self.rows.norms.of_gradient()
        nn.utils.clip_grads_with_norm_(parameters, self.clip_gradients, norm, foreach=True)
        return norm


def ballot(votes: Votes, device: torch.device) -> Tensor:
    """A rank's votes, as they are counted with those of the others."""
    found = torch.zeros(VOTES, device=device)
    for place, is_wanted in enumerate((votes.stop, votes.save)):
        if is_wanted:
            found[place].fill_(1.0)  # by the device: a copy from here would wait for it
    return found


def empty_counts(forward: Forward) -> Tensor:
    """Zeros in the form of what a worker counts in a step: the task's counts, then its votes."""
    return torch.cat([forward.no_counts(), torch.zeros(VOTES, device=forward.device)])
