"""The sums of local steps over all workers.

Nothing is exchanged between averages. So the sums of a step are sent with the average that follows
it, or earlier if they are read. Until then each rank has its own part.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from firecaffe.cluster.agree import gather_text
from firecaffe.cluster.group import Group
from firecaffe.errors import NotFiniteError
from firecaffe.exchange.leaves import tree_sum
from firecaffe.training.outcome import VOTES, Outcome, StepResult
from firecaffe.training.times import StepMarks
from firecaffe.training.updates.spread import Found


@dataclass
class LocalOutcome:
    """The outcome of a local step: this rank's part, and later the sums over all ranks."""

    step: int
    samples: int
    """The samples of all replicas."""
    weight: float
    """The samples as a number of full micro-batches."""
    losses: dict[int, Tensor]
    """The sum of the losses of each of this rank's replicas, shape (1,), by number."""
    counts: Tensor
    """The task's counts, and the number of replicas here whose gradient is not finite."""
    metrics: Sequence[str]
    times: StepMarks
    replicas: int
    ask: Callable[[], None]
    """Makes all ranks sum what is not summed yet."""
    sums: Tensor | None = None
    """The sums over all ranks; see `Outcome.checked`."""

    def read(self, look: Callable[[], None] = lambda: None) -> StepResult:
        """Wait for the sums. All ranks read the same outcomes in order; see `Outcome.read`."""
        if self.sums is None:
            self.ask()
        return self._outcome().read(look)

    def take(self, loss: Tensor, counts: Tensor, votes: Tensor) -> None:
        """Set the sums over all ranks. Raises: NotFiniteError, on all ranks."""
        self.sums = torch.cat([loss.reshape(1), counts[:-1], votes])
        outcome, broken = self._outcome(), int(counts[-1])
        if broken:
            error = NotFiniteError(
                f"the loss is {outcome.loss:.4g}; the gradients of {broken} of {self.replicas} "
                "replicas are not finite"
            )
            error.step = self.step + 1
            raise error
        outcome.check_finite()

    def _outcome(self) -> Outcome:
        assert self.sums is not None
        checked = Found(self.sums, torch.ones(1, dtype=torch.bool), torch.zeros(()), ())
        return Outcome(self.step, self.samples, self.weight, self.metrics, checked, self.times)


class LocalSums:
    def __init__(self, longest: int, counted: int, device: torch.device) -> None:
        self._longest, self._row, self._device = longest, counted + 1, device
        self.waiting: list[LocalOutcome] = []

    def add(self, outcome: LocalOutcome) -> None:
        self.waiting.append(outcome)

    def take_waiting(self) -> list[LocalOutcome]:
        taken, self.waiting = self.waiting, []
        return taken

    def no_losses(self) -> Tensor:
        return torch.zeros(self._longest, device=self._device)

    def no_counts(self) -> Tensor:
        """Return zeros for a rank's counts: a row for each step before an average, then votes."""
        return torch.zeros(self._longest * self._row + VOTES, device=self._device)

    def no_row(self) -> Tensor:
        return torch.zeros(self._row, device=self._device)

    def losses(self, number: int) -> Tensor:
        losses = self.no_losses()
        if self.waiting:
            losses[: len(self.waiting)] = torch.cat(
                [outcome.losses[number] for outcome in self.waiting]
            )
        return losses

    def counts(self, votes: Tensor) -> Tensor:
        counts = self.no_counts()
        rows = [outcome.counts for outcome in self.waiting]
        if rows:
            counts[: len(rows) * self._row] = torch.cat(rows)
        counts[-VOTES:] = votes
        return counts

    def settle(self, sent: Sequence[LocalOutcome], losses: Tensor, counts: Tensor) -> None:
        """Set the sums of outcomes. Raises: NotFiniteError, on all ranks."""
        rows = counts[:-VOTES].reshape(self._longest, self._row)
        for place, outcome in enumerate(sent):
            # The votes belong to the average, so only its last step gets them.
            votes = counts[-VOTES:] if place == len(sent) - 1 else torch.zeros(VOTES)
            outcome.take(losses[place], rows[place], votes)

    def sum_now(self, sharers: Group) -> None:
        """Sum what waits, on all ranks with replicas. Raises: NotFiniteError, PeerLostError."""
        waiting = self.take_waiting()
        local_steps = [
            [[loss.item() for _, loss in sorted(step.losses.items())], step.counts.tolist()]
            for step in waiting
        ]
        steps_of_ranks = [
            json.loads(text) for text in gather_text(sharers, json.dumps(local_steps))
        ]
        for outcome, *of_ranks in zip(waiting, *steps_of_ranks, strict=True):
            losses = [torch.tensor(loss) for of_rank, _ in of_ranks for loss in of_rank]
            counts = torch.tensor([counted for _, counted in of_ranks]).sum(0)
            outcome.take(tree_sum(losses, torch.add), counts, torch.zeros(VOTES))
