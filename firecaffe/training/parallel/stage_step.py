"""Steps of a network in stages: micro-batches go through the ranks of a row.

Each stage sums its gradients and its changes to buffers over its column, as a worker by itself does
over all. The loss and the task's counts are known to the last stage alone, and each stage knows
which of its gradients are finite. So a row adds up what its stages know before the update, and then
each rank decides what one worker would.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from firecaffe.cluster.agree import finish
from firecaffe.data import Batch
from firecaffe.gradients.totals import Totals
from firecaffe.training.outcome import Outcome, Timings, Votes
from firecaffe.training.parallel.stage_forward import StageForward
from firecaffe.training.step import Stepper, ballot
from firecaffe.transport.queue import Mark

UNUSED = -1.0
"""The norm of a parameter's gradient that is not there."""


@dataclass
class StageStepper(Stepper):
    """Runs steps of this rank's stage."""

    stage: StageForward | None = None

    def run(self, step: int, learning_rate: float, vote: Callable[[], Votes] = Votes) -> Outcome:
        """Trains step `step`; see `Stepper.run`. Raises: the same."""
        assert self.stage is not None
        queue, start = self.reducer.queue, self.reducer.queue.mark()
        samples = self.batches.order.samples_in_step(step)
        weight = samples / self.forward.config.micro_batch_size
        self.reducer.begin_step(weight)
        self.forward.begin_step()
        waits: list[tuple[Mark, Mark]] = []
        fetch = _Fetch(self, step, waits) if self.stage.has_inputs else _no_batch
        ready = self.stage.run(step, self.leaves, fetch)
        for leaf in self.leaves:
            now = next(ready) if self.stage.samples(step, leaf) else None
            root = None if now is None else now.root
            tail = self.forward.empty_tail() if now is None else now.kept
            if leaf != self.leaves[-1]:
                self.reducer.add(leaf, root, tail)
            else:
                counts = torch.cat([self.forward.counts, ballot(vote(), self.forward.device)])
                self.reducer.add_last(leaf, root, tail, counts)
        next(ready, None)  # the last gradients go to the stage before
        if isinstance(fetch, _Fetch):
            fetch.finish()
        totals = self.reducer.finish_step()
        row = self._row_of(totals)
        outcome = partial(
            StageOutcome,
            step=step,
            samples=samples,
            weight=weight,
            metrics=self.forward.task.counted,
            sums=row.sums,
            is_finite=row.is_finite,
            norm=row.norm,
            names=row.names,
            overflows=False,
            totals=totals,
            start=start,
            waits=waits,
            micro_batches=len(self.leaves),
            idle_s=self.stage.runner.waited_s,
            stage=self.stage.staged.training.number,
        )
        outcome(end=queue.mark()).check_finite()
        if self.clip_gradients:
            own, norm = self.reducer.parameters, row.norm.to(self.forward.device)
            nn.utils.clip_grads_with_norm_(own, self.clip_gradients, norm, foreach=True)
        self.update(step, learning_rate, totals, weight)
        return outcome(end=queue.mark())

    def _row_of(self, totals: Totals) -> "Row":
        """Adds up what the stages know: zeros stand for what others do, so nothing is rounded."""
        assert self.stage is not None
        staged = self.stage.staged
        names = list(staged.trained())
        place_of = {name: place for place, name in enumerate(names)}
        sums = torch.cat([totals.tail[0], totals.counts]).cpu()
        of_gradients = torch.zeros(2, len(names), dtype=torch.float64)
        own = [place_of[name] for name in self.reducer.names]
        if own:
            of_gradients[0, own] = 1.0 - self.reducer.finite().cpu().double()
        if own and self.clip_gradients:
            of_gradients[1, own] = self._norms()
        told = torch.cat([sums.double(), of_gradients.flatten()])
        row = staged.mesh.row
        finish(row, partial(dist.all_reduce, told, group=row.group))
        in_row, of_gradients = told[: len(sums)], told[len(sums) :].view(2, -1)
        norm = torch.zeros(())
        if self.clip_gradients:
            # As clip_grad_norm_ has it: the norm of the norms of all gradients, in network order.
            used = of_gradients[1][of_gradients[1] != UNUSED]
            norm = torch.linalg.vector_norm(used.to(sums.dtype))
        return Row(in_row.to(sums.dtype), of_gradients[0] == 0, norm, names)

    def _norms(self) -> Tensor:
        gradients = [each.grad for each in self.reducer.parameters]
        found = torch._foreach_norm([each for each in gradients if each is not None])
        norms = iter(each.item() for each in found)
        told = [UNUSED if each is None else next(norms) for each in gradients]
        return torch.tensor(told, dtype=torch.float64)


@dataclass(frozen=True)
class Row:
    """What the stages of a row know together."""

    sums: Tensor
    """The loss, the metrics, and the votes."""
    is_finite: Tensor
    """Whether each gradient of the whole network is finite."""
    norm: Tensor
    """That of all gradients, if they are clipped; else 0."""
    names: Sequence[str]
    """The trained parameters of the whole network."""


@dataclass(frozen=True)
class StageOutcome(Outcome):
    """The outcome of a step, with the time in which this stage waited for others."""

    idle_s: float
    stage: int

    def _timings(self) -> Timings:
        found = super()._timings()
        return replace(
            found,
            compute_s=found.compute_s - self.idle_s,
            exposed_communication_s=found.exposed_communication_s + self.idle_s,
            idle_s=self.idle_s,
            stage=self.stage,
        )


class _Fetch:
    """The micro-batches of a step in their order. Those without samples are passed over."""

    def __init__(self, stepper: Stepper, step: int, waits: list[tuple[Mark, Mark]]) -> None:
        self._stepper, self._step, self._waits = stepper, step, waits
        self._coming = self._batches()

    def __call__(self, leaf: int) -> Batch:
        return next(batch for number, batch in self._coming if number == leaf)

    def finish(self) -> None:
        """Takes those that are left."""
        for _ in self._coming:
            pass

    def _batches(self) -> Iterator[tuple[int, Batch]]:
        mark = self._stepper.reducer.queue.mark
        for leaf in self._stepper.leaves:
            asked = mark()
            batch = self._stepper.batches.train_batch(self._step, leaf)
            self._waits.append((asked, mark()))
            yield leaf, batch


def _no_batch(leaf: int) -> Batch:
    raise AssertionError("a stage between others sees no samples")
