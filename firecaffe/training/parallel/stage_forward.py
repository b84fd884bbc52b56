"""The micro-batches of a training, and the batches of its evaluations, through a rank's stage."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from firecaffe.data import Batch, SampleOrder
from firecaffe.parallel.stage_run import MicroBatches, Ready, StageRunner
from firecaffe.training.evaluate import EvalBatch
from firecaffe.training.forward import Forward, laid_out
from firecaffe.training.mix import Mixed
from firecaffe.training.parallel.overflow import begin_scale
from firecaffe.training.parallel.staged import StagedNetwork

FetchBatch = Callable[[int], Batch]
"""A micro-batch of a step by its number. Asked on the first stage and on the last."""


class StageForward:
    """This rank's stage, with what the first and the last one do besides: inputs and losses."""

    def __init__(self, forward: Forward, staged: StagedNetwork, order: SampleOrder) -> None:
        self.forward, self.staged, self._order = forward, staged, order
        row, arithmetic = staged.mesh.row, forward.arithmetic
        begin_scale(forward.scaler, forward.device)  # the last stage alone has a loss
        self.runner = StageRunner(staged.training, row, staged.words.pipeline, arithmetic)

    @property
    def has_inputs(self) -> bool:
        """Whether this rank asks for batches: for their inputs, or for their targets."""
        return self.staged.training.is_first or self.staged.training.is_last

    def close(self) -> None:
        """Ends its threads, which may still wait for a rank that is lost."""
        self.runner.close(wait=False)

    def samples(self, step: int, leaf: int) -> int:
        """The number of samples of a micro-batch; at the end of an epoch there may be none."""
        size = self._order.micro_batch_size
        return max(0, min(size, self._order.samples_in_step(step) - leaf * size))

    def run(self, step: int, leaves: Sequence[int], fetch: FetchBatch) -> Iterator[Ready[Any]]:
        """Yields those micro-batches of a step that have samples, when backward can be run, each
        with its tail; see `StageRunner.run`.
        """
        filled = [leaf for leaf in leaves if self.samples(step, leaf)]
        return self.runner.run(filled, _Step(self, step, fetch))

    def first_backward(self, fetch: FetchBatch) -> Tensor | None:
        """Runs backward for the training's first micro-batch. Returns its loss, if it is known."""
        self.forward.begin_step()
        loss = None
        for ready in self.run(0, [0], fetch):
            loss = ready.root
            if loss is not None:
                torch.autograd.backward(loss)
        return loss if self.staged.training.is_last else None

    def outputs(
        self, batches: Iterator[EvalBatch], numbers: Sequence[int]
    ) -> Iterator[tuple[EvalBatch, Any]]:
        """Evaluates batches of these numbers; see `training.evaluate.Outputs`."""
        stage = self.staged.evaluation

        def inputs(_: int) -> Any:
            return laid_out(next(batches)[1], self.forward.config)

        for _, outputs in self.runner.outputs(stage, numbers, inputs):
            if stage.is_last:
                yield next(batches), outputs

    def training_outputs(
        self, numbers: Sequence[int], inputs: Callable[[int], Any]
    ) -> Iterator[object]:
        """Runs the network's forward as in training; see `training.norms.Run`."""
        yield from self.runner.outputs(self.staged.training, numbers, inputs, draws=True)

    def try_outputs(self, inputs: Any) -> Any:
        """What the network returns, in the mode in which it is, to be differentiated by; None where
        another rank has it.
        """
        is_training = self.forward.model.training
        stage = self.staged.training if is_training else self.staged.evaluation
        ((_, outputs),) = self.runner.outputs(stage, [0], lambda _: inputs)
        return None if outputs is None else tree_map(_differentiable, outputs)


class _Step(MicroBatches[list[Tensor]]):
    """The micro-batches of one step."""

    def __init__(self, stage: StageForward, step: int, fetch: FetchBatch) -> None:
        self._stage, self._forward = stage, stage.forward
        self._step, self._fetch = step, fetch
        self._last: tuple[Tensor, Any, Mixed] | None = None
        """The loss of the micro-batch that just ran, the outputs, and what it is of."""

    def inputs(self, leaf: int) -> Any:
        mixed = self._forward.begin(*self._fetch(leaf), self._step, leaf)
        return laid_out(mixed.inputs, self._forward.config)

    def loss(self, leaf: int, outputs: Any) -> Tensor:
        mixed = self._forward.mixing(*self._fetch(leaf), self._step, leaf)
        loss = mixed.loss(self._forward.task.loss, outputs)
        loss = self._forward.weighted(loss, self._stage.samples(self._step, leaf))
        self._last = loss, outputs, mixed
        return self._forward.scaler.scale(loss)

    def end(self, leaf: int) -> list[Tensor]:
        loss = None
        if self._last is not None:
            loss, outputs, mixed = self._last
            self._forward.count(outputs, mixed)
            self._last = None
        return self._forward.tail(loss, leaf, self._stage.samples(self._step, leaf))


def _differentiable(output: Any) -> Any:
    is_float = isinstance(output, Tensor) and output.is_floating_point()
    return output.detach().clone().requires_grad_() if is_float else output
