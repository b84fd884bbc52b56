"""Stages on ranks: each micro-batch's gradients, losses and buffers are those of the network that
is whole, in one process. Trainings in stages are in `test_stage_layouts.py` and the matrix.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from firecaffe.cluster.agree import digest
from firecaffe.cluster.world import join
from firecaffe.errors import PeerLostError, RecipeError
from firecaffe.gradients.buffers import BufferChanges
from firecaffe.parallel.stage_run import MicroBatches, StageRunner
from firecaffe.parallel.stages import ORDERS, cut_stages
from tests.unit.parallel.in_stages import odd, odd_loss
from tests.world import Ranks

SAMPLES, LEAVES = 3, range(6)


class Case(NamedTuple):
    network: nn.Module
    arithmetic: Callable[[], AbstractContextManager[object]]


def case(name: str) -> Case:
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


def by_stages(name: str, cuts: list[str], order: str) -> tuple[Found, float]:
    with join("cpu") as world:
        made = case(name)
        stage = cut_stages(made.network, cuts)[world.rank]
        with StageRunner(stage, world, order, made.arithmetic) as runner:
            step = Step(made, stage.module, 0)
            found = each_leaf(step, stage.module, in_stages(step, runner, LEAVES))
            return found, runner.waited_s


@pytest.mark.parametrize(
    ("name", "cuts", "order"),
    [
        ("odd", ["act"], "1f1b"),
        *(("odd", ["head", "middle.1", "last"], order) for order in ORDERS),
        ("odd", ["act", "middle", "last.2"], "gpipe"),
        ("odd in bfloat16", ["middle.1"], "1f1b"),
    ],
    ids=str,
)
def test_each_micro_batch_has_the_bits_of_the_whole_network(
    ranks: Ranks, name: str, cuts: list[str], order: str
) -> None:
    made = case(name)
    step = Step(made, made.network, 0)
    expected = each_leaf(step, made.network, whole(step, made.network))
    found: Found = {}
    for of_stage, waited_s in ranks.shared(len(cuts) + 1, by_stages, name, cuts, order):
        assert not of_stage.keys() & found.keys()
        found |= of_stage
        assert waited_s > 0
    assert found == expected


def evaluated(cuts: list[str]) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs after one step of training and after two, as far as they are known here."""
    out: tuple[list[Tensor], list[Tensor]] = [], []
    with join("cpu") as world:
        made = case("odd")
        stage = cut_stages(made.network, cuts)[world.rank]
        for_evaluation = cut_stages(made.network.eval(), cuts)[world.rank]
        with StageRunner(stage, world) as runner:
            for number in range(2):
                step = Step(made, stage.module, number)
                made.network.train()
                each_leaf(step, stage.module, in_stages(step, runner, LEAVES))
                made.network.eval()
                outputs = runner.outputs(for_evaluation, LEAVES, step.inputs)
                known = [each for _, each in outputs if each is not None]
                assert all(each["side"] is None for each in known)  # as the head is not called
                out[number].extend(each["out"] for each in known)
            return out


def test_outputs_in_evaluation(ranks: Ranks) -> None:
    made = case("odd")
    network = made.network.eval()
    expected = []
    for number in range(2):
        step = Step(made, network, number)
        with torch.no_grad():
            expected.append([network(step.inputs(leaf))["out"] for leaf in LEAVES])
    *others, last = ranks.shared(3, evaluated, ["act", "last"])
    assert others == [([], []), ([], [])]
    for outputs, wanted in zip(last, expected, strict=True):
        assert len(outputs) == len(wanted)
        assert all(map(torch.equal, outputs, wanted))


class Plain(MicroBatches[None]):
    def inputs(self, leaf: int) -> Tensor:
        return torch.randn(2, 4)

    def loss(self, leaf: int, outputs: Tensor) -> Tensor:
        return outputs.sum()

    def end(self, leaf: int) -> None:
        pass


class Noisy(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * (1 + random.random())


def drawn_in_stages(place: int) -> str:
    """What is said of a network of two stages, one of which draws."""
    layers: list[nn.Module] = [nn.Linear(4, 4), nn.Linear(4, 4)]
    layers.insert(place, Noisy())
    with join("cpu") as world:
        stage = cut_stages(nn.Sequential(*layers), ["1" if place else "2"])[world.rank]
        with StageRunner(stage, world) as runner:
            try:
                for ready in runner.run([0], Plain()):
                    assert ready.root is not None
                    ready.root.backward()  # type: ignore[no-untyped-call]
            except (RecipeError, PeerLostError) as error:
                return str(error)
    return ""


def test_a_later_stage_draws_from_torch_s_generator_alone(ranks: Ranks) -> None:
    assert ranks.run(2, drawn_in_stages, 0) == ["", ""]
    _, said = ranks.run(2, drawn_in_stages, 2)
    assert "layers of stage 1 draw from python's random" in said
