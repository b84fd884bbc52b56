"""Steps of a network, whole or in stages, and what each of their micro-batches comes to."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from firecaffe.cluster.agree import digest
from firecaffe.gradients.buffers import BufferChanges
from firecaffe.parallel.stage_run import MicroBatches, StageRunner
from tests.unit.parallel.odd import odd, odd_loss

SAMPLES, LEAVES = 3, range(6)


class Case(NamedTuple):
    """A network, what is around its forward, and the micro-batches of a step."""

    network: nn.Module
    arithmetic: Callable[[], AbstractContextManager[object]]
    num_leaves: int = LEAVES[-1] + 1


def case(name: str) -> Case:
    """odd, or odd in bfloat16."""
    autocast = partial(torch.autocast, "cpu", torch.bfloat16)
    return Case(odd()[0], autocast if name.endswith("bfloat16") else nullcontext)


class Step(MicroBatches[list[Tensor]]):
    """The micro-batches of a step; the last of them is short."""

    def __init__(self, case: Case, network: nn.Module, step: int) -> None:
        self.case, self.step = case, step
        self.buffers = BufferChanges(network)
        self.buffers.begin_step()
        self.losses: dict[int, Tensor] = {}

    def weight(self, leaf: int) -> float:
        return (SAMPLES - (leaf == LEAVES[-1])) / SAMPLES

    def inputs(self, leaf: int) -> Any:
        torch.manual_seed(1000 * self.step + leaf)
        return {"image": torch.randn(round(self.weight(leaf) * SAMPLES), 3, 8, 8)}

    def loss(self, leaf: int, outputs: Any) -> Tensor:
        loss = odd_loss(outputs) * self.weight(leaf)
        self.losses[leaf] = loss.detach().reshape(1).clone()
        return loss

    def end(self, leaf: int) -> list[Tensor]:
        """The loss, if it is known here, and the changes to buffers."""
        loss = self.losses.get(leaf, torch.zeros(1))
        return [loss, *self.buffers.take(leaf, self.weight(leaf))]


def whole(step: Step, network: nn.Module) -> Iterator[tuple[int, Tensor, list[Tensor]]]:
    """Each micro-batch of a step through the whole network."""
    for leaf in LEAVES:
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
