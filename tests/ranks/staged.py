"""Steps of a network, whole or in stages, and what each of their micro-batches comes to."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from firecaffe.cluster.agree import digest
from firecaffe.gradients.buffers import BufferChanges
from firecaffe.models.model import HeadedLogits, classification_loss
from firecaffe.parallel.stage_run import MicroBatches, StageRunner
from tests.unit.parallel.in_stages import narrow
from tests.unit.parallel.odd import odd, odd_loss

SAMPLES = 3


class Case(NamedTuple):
    """A network, the size of its images, its loss, the micro-batches of a step, and what is around
    forward.
    """

    network: nn.Module
    size: int
    loss: Callable[[Any], Tensor]
    num_leaves: int
    arithmetic: Callable[[], AbstractContextManager[object]] = nullcontext


def case(name: str) -> Case:
    torch.manual_seed(2)
    if name == "odd":
        return Case(odd()[0], 8, odd_loss, 6)
    if name == "odd in bfloat16":
        autocast = partial(torch.autocast, "cpu", torch.bfloat16)
        return Case(odd()[0], 8, odd_loss, 6, autocast)
    return Case(narrow(name), 224, headed_loss, 3)


def headed_loss(outputs: HeadedLogits) -> Tensor:
    return classification_loss(outputs, torch.arange(len(outputs.logits)) % 5)


class Step(MicroBatches[list[Tensor]]):
    """The micro-batches of a step; the last of them is short."""

    def __init__(self, case: Case, network: nn.Module, step: int) -> None:
        self.case, self.step, self.is_odd = case, step, case.loss is odd_loss
        self.buffers = BufferChanges(network)
        self.buffers.begin_step()
        self.losses: dict[int, Tensor] = {}

    def weight(self, leaf: int) -> float:
        return (SAMPLES - (leaf == self.case.num_leaves - 1)) / SAMPLES

    def inputs(self, leaf: int) -> Any:
        torch.manual_seed(1000 * self.step + leaf)
        samples = round(self.weight(leaf) * SAMPLES)
        images = torch.randn(samples, 3, self.case.size, self.case.size)
        return {"image": images} if self.is_odd else images

    def loss(self, leaf: int, outputs: Any) -> Tensor:
        loss = self.case.loss(outputs) * self.weight(leaf)
        self.losses[leaf] = loss.detach().reshape(1).clone()
        return loss

    def end(self, leaf: int) -> list[Tensor]:
        """The loss, if it is known here, and the changes to buffers."""
        loss = self.losses.get(leaf, torch.zeros(1))
        return [loss, *self.buffers.take(leaf, self.weight(leaf))]


def whole(step: Step, network: nn.Module) -> Iterator[tuple[int, Tensor, list[Tensor]]]:
    """Each micro-batch of a step through the whole network."""
    for leaf in range(step.case.num_leaves):
        step.buffers.begin_micro_batch()
        inputs = step.inputs(leaf)
        with step.case.arithmetic():
            loss = step.loss(leaf, network(inputs))
        yield leaf, loss, step.end(leaf)


def in_stages(
    step: Step, runner: StageRunner, leaves: Sequence[int]
) -> Iterator[tuple[int, Tensor | None, list[Tensor]]]:
    for ready in runner.run(leaves, step):
        yield ready.leaf, ready.root, ready.kept


Found = dict[tuple[int, str], str | float]
"""By micro-batch: the digest of each gradient and of each buffer after forward, and the loss."""


def each_leaf(step: Step, network: nn.Module, ready: Iterator[Any]) -> Found:
    """What each micro-batch of a step comes to."""
    found: Found = {}
    take = step.end

    def end(leaf: int) -> list[Tensor]:
        for name, buffer in network.named_buffers():
            found[leaf, name] = digest([(name, buffer)])
        return take(leaf)

    step.end = end  # type: ignore[method-assign]
    for leaf, root, _ in ready:
        if root is not None:
            torch.autograd.backward(root)
        for name, parameter in network.named_parameters():
            if parameter.grad is not None:
                found[leaf, name] = digest([(name, parameter.grad)])
            parameter.grad = None
    return found | {(leaf, "loss"): loss.item() for leaf, loss in step.losses.items()}
