"""Balanced shares while a training goes on: measured by each rank, decided by all together.

A rank's own time of a step is that until its last gradient is there: reading its samples, forward
and backward. Waiting for its data is part of it, for who has less to compute has less to read. What
comes after is waiting for others and the update, which a smaller share would not make shorter.
"""

import json
import statistics
from dataclasses import asdict, dataclass, field

from firecaffe.cluster.agree import gather_text
from firecaffe.cluster.group import Group
from firecaffe.exchange.leaves import Shares
from firecaffe.synchrony.shares import next_shares
from firecaffe.training.outcome import StepResult, Timings


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

    def line(self, before: Shares) -> str:
        """The change for people."""
        now = ", ".join(map(str, self.micro_batches_by_rank))
        then = ", ".join(str(len(share)) for share in before)
        taken = ", ".join(f"{each * 1e3:.3g}" for each in self.seconds_by_rank)
        return (
            f"shares from step {self.step + 1} on: {now} micro-batches (before: {then}); "
            f"one takes {taken} ms"
        )


@dataclass
class Balance:
    """Decides how many micro-batches each rank computes, the same on all ranks."""

    world: Group
    num_leaves: int
    full_step: int
    """The samples of a full step; shorter ones, at the end of an epoch, are not measured."""
    every: int
    """The number of steps between two decisions."""
    shares: Shares
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
        before, self.shares = self.shares, next_shares(self.num_leaves, seconds, self.shares)
        if self.shares == before:
            return ""
        self.changes.append(Change(done, self.micro_batches_by_rank, seconds))
        return self.changes[-1].line(before)

    @property
    def micro_batches_by_rank(self) -> list[int]:
        """How many micro-batches each rank computes now."""
        return [len(share) for share in self.shares]

    def as_dict(self) -> dict[str, object]:
        """What a run's record says of it."""
        return {
            "micro_batches_by_rank": self.micro_batches_by_rank,
            "changes": [asdict(change) for change in self.changes],
        }


def own_seconds(timings: Timings) -> float:
    """What a rank took for each of its micro-batches in a step."""
    return (timings.data_s + timings.compute_s) / timings.micro_batches
