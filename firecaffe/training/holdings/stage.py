"""A rank that holds a stage of the model, or parts of a stage's layers.

The first stage gets the inputs; the last stage has the loss and the task's counts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from firecaffe.cluster.group import Group
from firecaffe.data import Batch, SampleOrder
from firecaffe.parallel.stage_run import MicroBatches, StageRunner
from firecaffe.parallel.stages import idle_share
from firecaffe.training.evaluation import EvalBatch
from firecaffe.training.forward import Forward, match_format
from firecaffe.training.holdings.holding import Ready
from firecaffe.training.holdings.split_layers import RowHolding
from firecaffe.training.outcome import FetchBatch, Spent
from firecaffe.training.parallel.staged import StagedNetwork
from firecaffe.training.sample_mixing import Mixed


class Stages(RowHolding):
    def __init__(
        self, forward: Forward, network: nn.Module, staged: StagedNetwork, order: SampleOrder
    ) -> None:
        super().__init__(forward, network, staged)
        self._staged, self._order, self._idle_s = staged, order, 0.0
        # A stage may have no trained parameters.
        self.everywhere = dict[str, nn.Parameter]()
        for name, outline in staged.trained().items():
            local_names = [n for n in staged.names.own(name) if n in self.named]
            self.everywhere |= {n: self.named[n] for n in local_names} or {name: outline}
        training = staged.training
        self.knows_loss = training.is_last
        self.has_inputs = training.is_first or training.is_last  # or targets
        if forward.scaler.is_enabled():  # only the last stage scales a loss
            forward.scaler.scale(torch.zeros((), device=forward.device))
        order_of = staged.words.pipeline
        self._runner = StageRunner(training, staged.mesh.line, order_of, forward.arithmetic)

    @property
    def result_group(self) -> Group:
        return self._staged.mesh.plane

    def close(self) -> None:
        """End the runner's threads, which may still wait for a lost rank."""
        self._runner.close(wait=False)

    def run(self, step: int, leaves: Sequence[int], fetch: FetchBatch) -> Iterator[Ready]:
        """Yield micro-batches. Those without samples do not pass through the stages."""
        coming = ((leaf, fetch(leaf)) for leaf in leaves)

        def fetch_filled(leaf: int) -> Batch:
            return next(batch for number, batch in coming if number == leaf)

        filled = [leaf for leaf in leaves if self._samples(step, leaf)]
        ready = self._runner.run(filled, _Step(self, step, fetch_filled))
        for leaf in leaves:
            now = next(ready) if self._samples(step, leaf) else None
            if now is None:
                yield Ready(leaf, None, self.forward.empty_tail())
            else:
                yield Ready(leaf, now.root, now.kept)
        next(ready, None)  # the last gradients go to the stage before
        if self.has_inputs:
            for _ in coming:  # micro-batches without samples
                pass
        self._idle_s += self._runner.waited_s

    def spent(self) -> Spent:
        staged = self._staged
        between_s = staged.group.seconds if staged.chosen else None
        return Spent(between_s, self._idle_s, staged.training.number)

    def first_backward(self, first: Batch) -> Tensor | None:
        self.forward.begin_step()
        root = None
        for ready in self.run(0, [0], lambda _: first):
            root = ready.root
            if root is not None:
                torch.autograd.backward(root)
        return root if self.knows_loss else None

    def outputs(
        self, batches: Iterator[EvalBatch], numbers: Sequence[int], num_samples: int
    ) -> Iterator[tuple[EvalBatch, Any]]:
        stage = self._staged.evaluation

        def inputs(_: int) -> Any:
            return match_format(next(batches)[1], self.forward.config)

        ready = self._runner.outputs(stage, numbers, inputs)
        if stage.is_last:
            # Read a batch before its outputs: this seeds generators that the network draws from.
            yield from ((batch, next(ready)[1]) for batch in batches)
        for _ in ready:
            pass

    def training_outputs(
        self, numbers: Sequence[int], inputs: Callable[[int], Any]
    ) -> Iterator[object]:
        yield from self._runner.outputs(self._staged.training, numbers, inputs)

    def try_outputs(self, inputs: Any) -> Any:
        is_training = self.forward.model.training
        stage = self._staged.training if is_training else self._staged.evaluation
        ((_, outputs),) = self._runner.outputs(stage, [0], lambda _: inputs)
        return None if outputs is None else tree_map(_differentiable, outputs)

    @property
    def all_names(self) -> Sequence[tuple[str, nn.Parameter]]:
        return self._staged.tied

    @property
    def split_layers(self) -> Mapping[str, str] | None:
        return self._staged.chosen

    def row(self, num_leaves: int) -> dict[str, Any] | None:
        mesh = self._staged.mesh
        idle = idle_share(mesh.line.world_size, ceil(num_leaves / mesh.column.world_size))
        return {**self._staged.row, "idle_if_equal": float(idle)}

    def _samples(self, step: int, leaf: int) -> int:
        return self._order.samples_in_leaf(step, leaf)


class _Step(MicroBatches[list[Tensor]]):
    def __init__(self, stages: Stages, step: int, fetch: FetchBatch) -> None:
        self._stages, self._forward = stages, stages.forward
        self._step, self._fetch = step, fetch
        self._last: tuple[Tensor, Any, Mixed] | None = None

    def inputs(self, leaf: int) -> Any:
        mixed = self._forward.begin(*self._fetch(leaf), self._step, leaf)
        return match_format(mixed.inputs, self._forward.config)

    def loss(self, leaf: int, outputs: Any) -> Tensor:
        mixed = self._forward.mixing(*self._fetch(leaf), self._step, leaf)
        loss = mixed.loss(self._forward.task.loss, outputs)
        loss = self._forward.weighted(loss, self._stages._samples(self._step, leaf))
        self._last = loss, outputs, mixed
        return self._forward.scaler.scale(loss)

    def end(self, leaf: int) -> list[Tensor]:
        loss = None
        if self._last is not None:
            loss, outputs, mixed = self._last
            self._forward.count(outputs, mixed)
            self._last = None
        return self._forward.tail(loss, leaf, self._stages._samples(self._step, leaf))


def _differentiable(output: Any) -> Any:
    is_float = isinstance(output, Tensor) and output.is_floating_point()
    return output.detach().clone().requires_grad_() if is_float else output
