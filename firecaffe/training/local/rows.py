"""What the ranks of a row do in the steps of their replicas: one rank by itself, a model whose
layers are split, or one in stages.

A row hosts whole replicas, and its ranks train one after the other of them together, each its
parts. They agree on each replica's update, as on a synchronous one, and on the votes that came with
an average. All else is exchanged in columns, and between averages nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist
from torch import Tensor, nn

from firecaffe.cluster.agree import finish
from firecaffe.cluster.group import Group
from firecaffe.gradients.reducer import GradientReducer
from firecaffe.training.outcome import Outcome
from firecaffe.training.parallel.stage_step import StageOutcome, StageStepper
from firecaffe.training.parallel.step import Rows
from firecaffe.training.step import Stepper
from firecaffe.transport.queue import Mark

Waits = list[tuple[Mark, Mark]]


@dataclass
class LocalRow:
    """A rank by itself."""

    stepper: Stepper
    """That of the synchronous steps."""

    def begin_step(self) -> None:
        """Begins a step of all replicas."""

    def micro_batches(
        self, step: int, leaves: Sequence[int], waits: Waits
    ) -> Iterator[tuple[Tensor | None, list[Tensor]]]:
        """Yields of each micro-batch what is to be differentiated, and its tail. waits: takes marks
        before and after each wait for data.
        """
        mark = self.stepper.reducer.queue.mark
        for leaf in leaves:
            asked = mark()
            batch = self.stepper.batches.train_batch(step, leaf)
            waits.append((asked, mark()))
            yield self.stepper.forward(*batch, step, leaf)

    def settle(self, own: GradientReducer, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Clips the mean gradients of a replica. Returns its sums, and whether all gradients are
        finite, with which the whole row agrees. sums: of the loss and the counts.
        """
        is_finite = own.finite().all()
        if self.stepper.clip_gradients:
            most = self.stepper.clip_gradients
            is_finite &= nn.utils.clip_grad_norm_(own.parameters, most, foreach=True).isfinite()
        return sums, is_finite

    def votes(self, counted: Tensor) -> Tensor:
        """The votes of the whole row. counted: those of this rank's column."""
        return counted

    def outcome(self) -> Callable[..., Outcome]:
        """Makes this step's outcome."""
        return Outcome


@dataclass
class SplitRow(LocalRow):
    """Ranks with parts of layers, which all compute the same samples."""

    rows: Rows
    row: Group

    def begin_step(self) -> None:
        self.rows.begin_step()

    def settle(self, own: GradientReducer, sums: Tensor) -> tuple[Tensor, Tensor]:
        sums, is_finite = super().settle(own, sums)
        broken = _sum((~is_finite).float().cpu().reshape(1), self.row)
        return sums, (broken == 0).all().to(sums.device)

    def votes(self, counted: Tensor) -> Tensor:
        return _sum(counted, self.row)

    def outcome(self) -> Callable[..., Outcome]:
        return self.rows.outcome()


@dataclass
class StageRow(LocalRow):
    """Ranks with a stage each, of which the last one alone knows the loss."""

    stages: StageStepper
    row: Group
    _idle_s: float = 0.0

    def begin_step(self) -> None:
        self._idle_s = 0.0

    def micro_batches(
        self, step: int, leaves: Sequence[int], waits: Waits
    ) -> Iterator[tuple[Tensor | None, list[Tensor]]]:
        yield from self.stages.micro_batches(step, leaves, waits)
        assert self.stages.stage is not None
        self._idle_s += self.stages.stage.runner.waited_s

    def settle(self, own: GradientReducer, sums: Tensor) -> tuple[Tensor, Tensor]:
        told = self.stages.row_of(own, sums, own.finite())
        self.stages.clip(own, told)
        is_finite = told.is_finite.all() & told.norm.isfinite()
        return told.sums.to(sums.device), is_finite.to(sums.device)

    def votes(self, counted: Tensor) -> Tensor:
        return _sum(counted, self.row)

    def outcome(self) -> Callable[..., Outcome]:
        assert self.stages.stage is not None
        stage = self.stages.stage.staged.training.number
        return partial(StageOutcome, idle_s=self._idle_s, stage=stage)


def _sum(told: Tensor, row: Group) -> Tensor:
    if row.group is None:
        return told
    total = told.clone()
    finish(row, partial(dist.all_reduce, total, group=row.group))
    return total


def local_row(stepper: Stepper, row: Group) -> LocalRow:
    """stepper: that of the synchronous steps. row: the ranks that hold one model with this one."""
    if isinstance(stepper, StageStepper):
        return StageRow(stepper, stepper, row)
    return LocalRow(stepper) if stepper.rows is None else SplitRow(stepper, stepper.rows, row)
