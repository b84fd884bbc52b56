"""Steps that all ranks make together: batch, forward, backward, sum, update.

A rank computes its micro-batches one after the other. Their gradients are added in the order of the
micro-batch tree. During the last backward they are sent to the other ranks, bucket by bucket. Once
all sums are known, every rank that updates uses the same numbers.

The host never waits for a GPU here. A step's outcome is read once the device has computed it: on a
CPU at once, before the update; on a GPU after the next step was queued.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, optim

from firecaffe.data.train_batches import TrainBatches
from firecaffe.exchange.leaves import Shares
from firecaffe.gradients.reducer import GradientReducer
from firecaffe.training.forward import Forward
from firecaffe.training.holdings.holding import Holding
from firecaffe.training.outcome import VOTES, Outcome, Votes, ballot
from firecaffe.training.times import Spent, StepMarks
from firecaffe.training.updates.applier import Applier
from firecaffe.training.updates.every_rank import EveryRank
from firecaffe.training.updates.loss_scale import LossScale


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
        """Compute `leaves` in this order (see `Route.order`). A momentum of None stays as it is.

        `is_measured` says of a step, counted from 0, whether it measures the norms of gradients.
        """
        self.holding, self.update, self.batches = holding, update, batches
        self.leaves, self.momentum, self._is_measured = leaves, momentum, is_measured

    @property
    def behind(self) -> int:
        return 1 if self.update.queue.works_behind else 0

    @property
    def advice(self) -> str:
        return ""

    def run(self, step: int, learning_rate: float, vote: Callable[[], Votes] = Votes) -> Outcome:
        """Train step `step`, counted from 0, and leave every rank with the same weights.

        `vote` is called before the last backward. Raises: PeerLostError; NotFiniteError on all
        ranks, which keep the weights from before the step. On a GPU the outcome raises
        NotFiniteError when it is read.
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
        times.sums_are_there(totals)
        checked = update.check(totals, VOTES).to_host(queue)
        outcome = Outcome(step, samples, weight, holding.forward.task.counted, checked, times)
        if update.is_known:
            outcome.check_finite()
        update.apply(step, learning_rate, self.momentum(step))
        holding.set_buffers(totals.tail[1:], weight)
        times.end(update.exchanges)
        return outcome

    def share_out(self, shares: Shares, order: Callable[[range], list[int]], own: range) -> None:
        """Give ranks other micro-batches from the next step on, each share in `order`."""
        self.update.share_out(shares)
        self.holding.share_out(shares, order)
        self.leaves = order(own)

    def _counts(self, vote: Callable[[], Votes]) -> Tensor:
        forward = self.holding.forward
        return torch.cat([self.holding.counts(), ballot(vote(), forward.device)])

    def _spent(self) -> Spent:
        return self.holding.spent().with_parts(self.update.parts_s)


def empty_counts(forward: Forward) -> Tensor:
    """Return zeros in the form of a rank's counts of a step: the task's counts, then its votes."""
    return torch.cat([forward.no_counts(), torch.zeros(VOTES, device=forward.device)])


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
