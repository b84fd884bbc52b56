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
from firecaffe.gradients.reducer import GradientReducer
from firecaffe.training.outcome import Outcome, Timings, Votes
from firecaffe.training.parallel.norms import UNUSED, total
from firecaffe.training.parallel.overflow import unscale
from firecaffe.training.parallel.stage_forward import StageForward
from firecaffe.training.step import Stepper, ballot
from firecaffe.transport.queue import Mark


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
        ready = self.micro_batches(step, self.leaves, waits)
        for (root, tail), leaf in zip(ready, self.leaves, strict=True):
            if leaf != self.leaves[-1]:
                self.reducer.add(leaf, root, tail)
            else:
                counts = torch.cat([self.forward.counts, ballot(vote(), self.forward.device)])
                self.reducer.add_last(leaf, root, tail, counts)
        totals = self.reducer.finish_step()
        finite = self.reducer.finite()
        unscale(self.forward.scaler, self.optimizer, self.stage.staged.mesh.row)
        row = self.row_of(self.reducer, torch.cat([totals.tail[0], totals.counts]), finite)
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
            overflows=self.forward.scaler.is_enabled(),
            totals=totals,
            start=start,
            waits=waits,
            micro_batches=len(self.leaves),
            idle_s=self.stage.runner.waited_s,
            stage=self.stage.staged.training.number,
        )
        outcome(end=queue.mark()).check_finite()
        self.clip(self.reducer, row)
        self.update(step, learning_rate, totals, weight)
        return outcome(end=queue.mark())

    def micro_batches(
        self, step: int, leaves: Sequence[int], waits: list[tuple[Mark, Mark]]
    ) -> Iterator[tuple[Tensor | None, list[Tensor]]]:
        """Yields of each micro-batch what is to be differentiated, and its tail. waits: takes marks
        before and after each wait for data.
        """
        assert self.stage is not None
        fetch = _Fetch(self, step, leaves, waits) if self.stage.has_inputs else _no_batch
        ready = self.stage.run(step, leaves, fetch)
        for leaf in leaves:
            now = next(ready) if self.stage.samples(step, leaf) else None
            if now is None:
                yield None, self.forward.empty_tail()
            else:
                yield now.root, now.kept
        next(ready, None)  # the last gradients go to the stage before
        if isinstance(fetch, _Fetch):
            fetch.finish()

    def clip(self, reducer: GradientReducer, row: "Row") -> None:
        """Clips the gradients of this stage by the norm of the whole network's."""
        if self.clip_gradients:
            own, norm = reducer.parameters, row.norm.to(self.forward.device)
            nn.utils.clip_grads_with_norm_(own, self.clip_gradients, norm, foreach=True)

    def row_of(self, reducer: GradientReducer, known: Tensor, finite: Tensor) -> "Row":
        """Adds up what the stages know: zeros stand for what others do, so nothing is rounded.
        reducer: has this stage's gradients. known: what the last stage counts, and votes.
        finite: whether each of these gradients was, before the loss scale was undone.
        """
        assert self.stage is not None
        staged = self.stage.staged
        names = list(staged.trained())
        place_of = {name: place for place, name in enumerate(names)}
        sums = known.cpu()
        of_gradients = torch.zeros(2, len(names), dtype=torch.float64)
        own = [place_of[name] for name in reducer.names]
        if own:
            of_gradients[0, own] = 1.0 - finite.cpu().double()
        if own and self.clip_gradients:
            of_gradients[1, own] = _norms(reducer)
        told = torch.cat([sums.double(), of_gradients.flatten()])
        row = staged.mesh.row
        finish(row, partial(dist.all_reduce, told, group=row.group))
        in_row, of_gradients = told[: len(sums)], told[len(sums) :].view(2, -1)
        norm = torch.zeros(())
        if self.clip_gradients:
            dtypes = [each.dtype for each in staged.trained().values()]
            norm = total(of_gradients[1], dtypes)
        return Row(in_row.to(sums.dtype), of_gradients[0] == 0, norm, names)


def _norms(reducer: GradientReducer) -> Tensor:
    gradients = [each.grad for each in reducer.parameters]
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

    def __init__(
        self, stepper: Stepper, step: int, leaves: Sequence[int], waits: list[tuple[Mark, Mark]]
    ) -> None:
        self._stepper, self._step, self._leaves, self._waits = stepper, step, leaves, waits
        self._coming = self._batches()

    def __call__(self, leaf: int) -> Batch:
        return next(batch for number, batch in self._coming if number == leaf)

    def finish(self) -> None:
        """Takes those that are left."""
        for _ in self._coming:
            pass

    def _batches(self) -> Iterator[tuple[int, Batch]]:
        mark = self._stepper.reducer.queue.mark
        for leaf in self._leaves:
            asked = mark()
            batch = self._stepper.batches.train_batch(self._step, leaf)
            self._waits.append((asked, mark()))
            yield leaf, batch


def _no_batch(leaf: int) -> Batch:
    raise AssertionError("a stage between others sees no samples")
