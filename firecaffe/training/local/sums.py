"""The sums over all workers of local steps: with the next average, or before it is wanted.

Between averages nothing is exchanged. So what a step came to over all workers is told with the
average that follows it; until then each rank has its own part.
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
from firecaffe.training.updates.update import Found


@dataclass
class LocalOutcome:
    """A local step: what this rank knows of it, and later what it came to over all."""

    step: int
    samples: int
    """Of all replicas."""
    weight: float
    """The same, as a number of full micro-batches."""
    losses: dict[int, Tensor]
    """The sum of the losses of each of this rank's replicas, shape (1,)."""
    counts: Tensor
    """What the task counts, and the number of this rank's replicas whose gradient is not finite."""
    metrics: Sequence[str]
    times: StepMarks
    replicas: int
    """Of all ranks."""
    ask: Callable[[], None]
    """Has all ranks sum what is not summed yet."""
    sums: Tensor | None = None
    """Over all ranks: see `Outcome.found`."""

    def read(self, look: Callable[[], None] = lambda: None) -> StepResult:
        """See `Outcome.read`. All ranks read the same outcomes in the same order."""
        if self.sums is None:
            self.ask()
        return self._outcome().read(look)

    def take(self, loss: Tensor, counts: Tensor, votes: Tensor) -> None:
        """Takes the sums over all ranks. Raises: NotFiniteError, on all ranks."""
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
        found = Found(self.sums, torch.ones(1, dtype=torch.bool), torch.zeros(()), ())
        return Outcome(self.step, self.samples, self.weight, self.metrics, found, self.times)


class LocalSums:
    """The outcomes that wait for their sums, and their form in an average."""

    def __init__(self, longest: int, counted: int, device: torch.device) -> None:
        """longest: the most steps before an average. counted: the numbers that the task counts."""
        self._longest, self._row, self._device = longest, counted + 1, device
        self.waiting: list[LocalOutcome] = []

    def add(self, outcome: LocalOutcome) -> None:
        """Lets an outcome wait."""
        self.waiting.append(outcome)

    def take_waiting(self) -> list[LocalOutcome]:
        """The outcomes that wait, which do so no longer."""
        taken, self.waiting = self.waiting, []
        return taken

    def no_losses(self) -> Tensor:
        """The losses of a replica in the steps before an average; none."""
        return torch.zeros(self._longest, device=self._device)

    def no_counts(self) -> Tensor:
        """The counts of a rank in the steps before an average, a row each, then its votes; none."""
        return torch.zeros(self._longest * self._row + VOTES, device=self._device)

    def no_row(self) -> Tensor:
        """The counts of a rank in a step; none."""
        return torch.zeros(self._row, device=self._device)

    def losses(self, number: int) -> Tensor:
        """Those of a replica of this rank, in the steps that wait."""
        found = self.no_losses()
        if self.waiting:
            found[: len(self.waiting)] = torch.cat([each.losses[number] for each in self.waiting])
        return found

    def counts(self, votes: Tensor) -> Tensor:
        """Those of this rank, with its votes."""
        found = self.no_counts()
        rows = [each.counts for each in self.waiting]
        if rows:
            found[: len(rows) * self._row] = torch.cat(rows)
        found[-VOTES:] = votes
        return found

    def settle(self, sent: Sequence[LocalOutcome], losses: Tensor, counts: Tensor) -> None:
        """Tells outcomes their sums. Raises: NotFiniteError, on all ranks."""
        rows = counts[:-VOTES].reshape(self._longest, self._row)
        for place, outcome in enumerate(sent):
            # The votes belong to the average: they are told once.
            votes = counts[-VOTES:] if place == len(sent) - 1 else torch.zeros(VOTES)
            outcome.take(losses[place], rows[place], votes)

    def sum_now(self, sharers: Group) -> None:
        """Sums what waits over all that host replicas, which all call it.

        Raises: NotFiniteError, PeerLostError.
        """
        waiting = self.take_waiting()
        own = [
            [[each.item() for _, each in sorted(step.losses.items())], step.counts.tolist()]
            for step in waiting
        ]
        told = [json.loads(text) for text in gather_text(sharers, json.dumps(own))]
        for outcome, *of_ranks in zip(waiting, *told, strict=True):
            losses = [torch.tensor(each) for of_rank, _ in of_ranks for each in of_rank]
            counts = torch.tensor([counted for _, counted in of_ranks]).sum(0)
            outcome.take(tree_sum(losses, torch.add), counts, torch.zeros(VOTES))
