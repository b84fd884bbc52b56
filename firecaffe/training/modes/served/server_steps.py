"""Steps of a training with a server: events until the samples of a step are done.

A step has as many leaves as a synchronous one, but they may be others: faster learners may already
compute leaves of later steps. So the learning rate follows the samples that are done, and records,
evaluations and checkpoints stay as they are. The events come from a logged clock, or from a log.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from firecaffe.errors import NotFiniteError
from firecaffe.files import GrowingFile, write_atomically
from firecaffe.solvers.update_rules import set_delay
from firecaffe.synchrony.events import Event, Lose, Push, Tally
from firecaffe.synchrony.log import EVENTS, Lines, head
from firecaffe.synchrony.server_policies import Leaves, Update
from firecaffe.training.checkpoint import Checkpoint
from firecaffe.training.divergence import server_advice
from firecaffe.training.modes.every_step import EveryStep
from firecaffe.training.modes.served.coder import Coder, are_finite
from firecaffe.training.modes.served.server import Server, UpdateSettings
from firecaffe.training.modes.served.work_gradient import Contribution, Contributions, UpdateOrder
from firecaffe.training.outcome import Outcome, Timings, Votes, pack_votes
from firecaffe.training.piece import Numbers, NumbersOfParts
from firecaffe.training.updates.spread import Found
from firecaffe.transport.queue import Mark


class EventSource(Protocol):
    def next(self) -> Event: ...


class Clock(EventSource, Numbers, Protocol):
    def follow(self, event: Event) -> None:
        """Take a log's event. Raises: ValueError if it cannot follow the events before it."""


class LoggedClock(NumbersOfParts):
    def __init__(self, clock: Clock, first_version: int, learners: int) -> None:
        self._clock, self._head = clock, head(first_version, learners)
        self._lines, self.tally = Lines(), Tally()
        self._file: GrowingFile | None = None

    def open(self, folder: Path, checkpoint: Checkpoint | None) -> list[str]:
        """Open a log with the events up to a resumed checkpoint. Warn if it lacks some."""
        path, notes = folder / EVENTS, []
        if self._lines.count and checkpoint is not None and checkpoint.folder is not None:
            before = checkpoint.folder.parent.parent / EVENTS
            if not keep_lines(before, path, self._lines.count):
                path.unlink(missing_ok=True)
                notes.append(
                    f"warning: {before} does not have the events up to step {checkpoint.step}, so "
                    "that this run cannot be replayed"
                )
        else:
            path.unlink(missing_ok=True)  # from an attempt that has saved nothing
        self._file = GrowingFile(path, goes_on=path.exists())
        if not self._lines.count:
            self._file.write(self._lines.line(self._head))
        return notes

    def next(self) -> Event:
        event = self._clock.next()
        line = self._note(event)
        if self._file is not None:
            self._file.write(line)
        return event

    def follow(self, event: Event) -> None:
        """Take a logged event; the state becomes that of the run that wrote it."""
        if not self._lines.count:
            self._lines.line(self._head)
        self._clock.follow(event)
        self._note(event)

    def _note(self, event: Event) -> bytes:
        self.tally.take(event)
        return self._lines.event(event)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    @property
    def _parts(self) -> dict[str, Numbers]:
        return {"clock": self._clock, "lines": self._lines, "tally": self.tally}


def keep_lines(path: Path, into: Path, count: int) -> bool:
    """Copy a log's first lines, or cut it there. Return False and write nothing if it has fewer."""
    try:
        with open(path, encoding="ascii", newline="\n") as file:
            kept = [line for _, line in zip(range(count), file, strict=False)]
    except (OSError, UnicodeDecodeError):
        return False
    if len(kept) < count or not all(line.endswith("\n") for line in kept):
        return False
    write_atomically(into, "".join(kept))
    return True


RECENT = 100
"""The gradients whose mean staleness is reported if the training diverges."""


@dataclass
class Progress:
    done: int = 0
    """Leaves that are done: they count, or were given up."""

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]


@dataclass
class ServedStepper:
    warm: EveryStep
    server: Server
    source: EventSource
    contributions: Contributions
    plan: Leaves
    progress: Progress
    coder: Coder = field(default_factory=Coder)
    tell: Callable[[UpdateOrder], None] = lambda _: None
    """Sends the weights' owners an event that was executed here."""
    _staleness: deque[int] = field(default_factory=partial(deque, maxlen=RECENT), init=False)

    @property
    def behind(self) -> int:
        return self.warm.behind

    @property
    def advice(self) -> str:
        late = sum(self._staleness) / max(1, len(self._staleness))
        momentum = float(self.server.applier.optimizer.param_groups[0].get("momentum", 0.0))
        return server_advice(self.server.words, len(self.server.learners), late, momentum)

    def run(self, step: int, learning_rate: float, vote: Callable[[], Votes] = Votes) -> Outcome:
        is_warm = step < self.plan.first_step
        delay = self.server.words.delayed_updates(len(self.server.learners))
        set_delay(self.server.applier.optimizer, 1 if is_warm else delay)
        if is_warm:
            return self.warm.run(step, learning_rate, vote)
        settings = UpdateSettings(step, learning_rate, self.warm.momentum(step), delay)
        queue, forward = self.warm.update.queue, self.warm.holding.forward
        order = self.server.order
        window = _Window(queue.mark(), forward.zero_counts(), len(self.server.named))
        until = self.plan.before(step + 1)
        while self.progress.done < until:
            event, overflows = self.source.next(), False
            if isinstance(event, Push):
                if event.counts:
                    contribution = self.contributions.of(event.work)
                    if overflows := self._overflows(contribution):
                        contribution = replace(contribution, is_finite=None)
                    self.server.keep(event.work, contribution.gradient, overflows)
                    window.add(contribution, order.samples_in_leaf(*event.work.leaf))
                if event.update is not None:
                    begun = queue.mark()
                    self._update(event.update, settings, window)
                    window.updates.append((begun, queue.mark()))
                    self.progress.done += len(event.update.dropped)
                self.progress.done += event.counts
                if not window.is_finite:
                    break
            self.server.take(event)
            if isinstance(event, Lose):
                self.coder.forget(event.learner)
            self.tell(UpdateOrder(event, settings, overflows))
        window.end = queue.mark()
        votes = pack_votes(vote(), forward.device)
        checked = Found(
            sums=torch.cat([window.loss, window.counts, votes]),
            is_finite=window.gradients_are_finite,
            norm=window.norm,
            names=list(self.server.named),
        )
        weight = window.samples / order.micro_batch_size
        outcome = Outcome(step, window.samples, weight, forward.task.counted, checked, window)
        self._check(outcome)
        return outcome

    def _update(self, update: Update, settings: UpdateSettings, window: "_Window") -> None:
        self._staleness.extend(map(update.staleness, update.works))
        window.take(*self.server.prepare(update))
        if window.is_finite:
            self.server.apply(update, settings)

    def _overflows(self, contribution: Contribution) -> bool:
        if not self.server.applier.scale.is_on:
            return False
        is_finite = contribution.is_finite
        if is_finite is None:
            is_finite = are_finite(self.server.named, contribution.gradient.tensors.items())
        return not bool(is_finite[:-1].all())  # the last is for the norm

    def _check(self, outcome: Outcome) -> None:
        try:
            outcome.check_finite()
        except NotFiniteError as error:
            advised = NotFiniteError(f"{error}; {self.advice}")
            advised.step = error.step
            raise advised from None


class _Window:
    """The sums and times of a step. `data_s` and `compute_s` are those of rank 0's own learner.

    If that learner has its own thread, these times and `update_s` may overlap. No rank waits for an
    exchange.
    """

    end: Mark

    def __init__(self, start: Mark, counts: Tensor, parameters: int) -> None:
        self._start = start
        self.loss, self.counts = counts.new_zeros(1), counts
        self.samples, self.micro_batches = 0, 0
        self.data_s, self.compute_s = 0.0, 0.0
        self.by_rank: dict[int, tuple[int, float]] = {}
        self.updates: list[tuple[Mark, Mark]] = []
        self.gradients_are_finite = torch.ones(parameters, dtype=torch.bool, device=counts.device)
        self.norm = counts.new_zeros(())

    def add(self, contribution: Contribution, samples: int) -> None:
        self.loss = self.loss + contribution.gradient.tail[0]
        self.counts = self.counts + contribution.counts
        if contribution.is_finite is not None:
            is_finite = contribution.is_finite.to(self.counts.device)
            self.gradients_are_finite = self.gradients_are_finite & is_finite[:-1]
            self.norm = torch.where(is_finite[-1], self.norm, torch.inf)
        self.samples += samples
        count, seconds = self.by_rank.get(contribution.rank, (0, 0.0))
        took_s = contribution.data_s + contribution.compute_s
        self.by_rank[contribution.rank] = count + 1, seconds + took_s
        if contribution.rank == 0:
            self.micro_batches += 1
            self.data_s += contribution.data_s
            self.compute_s += contribution.compute_s

    def take(self, finite: Tensor, norm: Tensor) -> None:
        self.gradients_are_finite = self.gradients_are_finite & finite
        self.norm = torch.maximum(self.norm, norm)

    @property
    def is_finite(self) -> bool:
        are_finite = (self.loss.isfinite(), self.gradients_are_finite, self.norm.isfinite())
        return all(bool(flag.all()) for flag in are_finite)

    def is_over(self) -> bool:
        return self.end.is_over()

    def read(self, step: int) -> Timings:
        return Timings(
            step=step + 1,
            data_s=self.data_s,
            compute_s=self.compute_s,
            exposed_communication_s=0.0,
            exchange_s=0.0,
            update_s=sum(end.seconds_after(begin) for begin, end in self.updates),
            step_s=self.end.seconds_after(self._start),
            micro_batches=self.micro_batches,
            by_rank=self.by_rank,
        )
