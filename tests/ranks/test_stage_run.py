"""Stages on ranks: each micro-batch's gradients, losses and buffers are those of the network that
is whole, in one process. Trainings in stages are in `test_stage_layouts.py` and the matrix.
"""

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from firecaffe.cluster.world import join
from firecaffe.errors import PeerLostError, RecipeError
from firecaffe.parallel.stage_run import MicroBatches, StageRunner
from firecaffe.parallel.stages import ORDERS, cut_stages
from tests.ranks.staged import LEAVES, Found, Step, case, each_leaf, in_stages, whole
from tests.world import Ranks


def by_stages(name: str, cuts: list[str], order: str) -> tuple[Found, float]:
    with join("cpu") as world:
        made = case(name)
        stage = cut_stages(made.network, cuts)[world.rank]
        with StageRunner(stage, world, order, made.arithmetic) as runner:
            step = Step(made, stage.module, 0)
            found = each_leaf(step, stage.module, in_stages(step, runner, LEAVES))
            return found, runner.waited_s


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As on ranks: the bits depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
    ranks: Ranks, one_thread: None, name: str, cuts: list[str], order: str
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


def test_outputs_in_evaluation(ranks: Ranks, one_thread: None) -> None:
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
    """Micro-batches of random numbers."""

    def inputs(self, leaf: int) -> Tensor:
        return torch.randn(2, 4)

    def loss(self, leaf: int, outputs: Tensor) -> Tensor:
        return outputs.sum()

    def end(self, leaf: int) -> None:
        pass


class Noisy(nn.Module):
    """A layer that draws from python's generator."""

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
