"""Stages on ranks: each micro-batch's gradients, losses and buffers are those of the network that
is whole, in one process.
"""

import random
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from firecaffe.cluster.agree import digest
from firecaffe.cluster.group import Group, divide
from firecaffe.cluster.world import join
from firecaffe.errors import PeerLostError, RecipeError
from firecaffe.exchange.leaves import equal_shares
from firecaffe.exchange.route import find_route
from firecaffe.gradients.buffers import BufferChanges
from firecaffe.gradients.reducer import GradientReducer
from firecaffe.parallel.pipeline import ORDERS, most_held
from firecaffe.parallel.stage_run import MicroBatches, StageRunner
from firecaffe.parallel.stages import cut_stages
from firecaffe.transport.exchange import Exchange
from tests.ranks.staged import Found, Step, case, each_leaf, in_stages, whole
from tests.world import Ranks

STEPS = 2
NUM_LEAVES = 6


def by_stages(name: str, cuts: list[str], order: str) -> tuple[Found, float]:
    with join("cpu") as world:
        made = case(name)
        stage = cut_stages(made.network, cuts)[world.rank]
        with StageRunner(stage, world, order, made.arithmetic) as runner:
            step = Step(made, stage.module, 0)
            found = each_leaf(step, stage.module, in_stages(step, runner, range(made.num_leaves)))
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
        *(("odd", ["act"], order) for order in ORDERS),
        *(("odd", ["head", "middle.1", "last"], order) for order in ORDERS),
        *(("odd", ["act", "middle", "last.2"], order) for order in ORDERS),
        ("odd in bfloat16", ["middle.1"], "1f1b"),
        ("googlenet", ["inception4b"], "1f1b"),
        ("googlenet_bn", ["inception3b", "inception4b", "inception5a"], "gpipe"),
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
    for own, waited_s in ranks.shared(len(cuts) + 1, by_stages, name, cuts, order):
        assert not own.keys() & found.keys()
        found |= own
        assert waited_s > 0
    assert found == expected


class Trainer:
    """Steps of a network, or of a stage, whose gradients go through the tree of micro-batches."""

    def __init__(self, network: nn.Module, group: Group) -> None:
        """group: among which micro-batches are shared out."""
        self.network, self.group = network, group
        parameters = dict(network.named_parameters())
        self.optimizer = torch.optim.SGD(parameters.values(), lr=0.1, momentum=0.9)
        tail = [torch.zeros(1), *BufferChanges(network).no_changes()]
        route = find_route("tree", NUM_LEAVES, group.world_size)
        backwards = range(len(parameters) - 1, -1, -1)
        exchange = Exchange(group, route)
        counts = torch.zeros(1)
        self.reducer = GradientReducer(
            parameters, backwards, tail, counts, NUM_LEAVES, exchange, 2000
        )
        share = equal_shares(NUM_LEAVES, group.world_size)[group.rank]
        self.leaves = route.order(NUM_LEAVES, share)

    def run(self, step: Step, ready: Iterator[tuple[int, Tensor | None, list[Tensor]]]) -> float:
        """One step. Returns the sum of losses that are known to this stage."""
        weight = sum(step.weight(leaf) for leaf in range(NUM_LEAVES))
        self.reducer.begin_step(weight, self.leaves, lambda: torch.zeros(1))
        for leaf, root, tail in ready:
            self.reducer.add(leaf, root, tail)
        totals = self.reducer.finish_step()
        self.optimizer.step()
        step.buffers.finish_step(totals.tail[1:], weight)
        return totals.tail[0].item()


def trained_whole() -> tuple[list[float], dict[str, Tensor]]:
    made = case("odd")
    network = made.network
    trainer = Trainer(network, Group(0, 1, torch.device("cpu")))
    losses = []
    with trainer.reducer:
        for number in range(STEPS):
            step = Step(made, network, number)
            losses.append(trainer.run(step, whole(step, network)))
    return losses, network.state_dict()


def trained(cuts: list[str], order: str) -> tuple[list[float], dict[str, Tensor]]:
    """On ranks that are a mesh: columns have the network in stages, rows share micro-batches."""
    num_stages = len(cuts) + 1
    with join("cpu") as world, ExitStack() as stack:
        numbers = range(world.world_size)
        rows = [list(numbers[k::num_stages]) for k in range(num_stages)]
        columns = [list(numbers[a:b]) for a, b in pairwise([*numbers[::num_stages], len(numbers)])]
        row = stack.enter_context(divide(world, rows))
        column = stack.enter_context(divide(world, columns))
        made = case("odd")
        stage = cut_stages(made.network, cuts)[column.rank]
        trainer = Trainer(stage.module, row)
        runner = stack.enter_context(StageRunner(stage, column, order))
        losses = []
        with trainer.reducer:
            for number in range(STEPS):
                step = Step(made, stage.module, number)
                losses.append(trainer.run(step, in_stages(step, runner, trainer.leaves)))
        return losses, stage.module.state_dict()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("world_size", "cuts"),
    [(1, []), (2, ["middle"]), (4, ["middle"]), (4, ["head", "act", "last"])],
)
def test_training_in_stages_ends_in_the_bits_of_one_worker(
    ranks: Ranks, one_thread: None, world_size: int, cuts: list[str], order: str
) -> None:
    """Four ranks: two stages on two ranks each, or four stages."""
    expected_losses, expected = trained_whole()
    state: dict[str, Tensor] = {}
    for rank, (losses, own) in enumerate(ranks.shared(world_size, trained, cuts, order)):
        is_last = rank % (len(cuts) + 1) == len(cuts)
        assert losses == (expected_losses if is_last else [0.0] * STEPS)
        state |= own
    assert digest(sorted(state.items())) == digest(sorted(expected.items()))


def evaluated(cuts: list[str]) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs before and after a step of training, as far as they are known here."""
    with join("cpu") as world:
        made = case("odd")
        stage = cut_stages(made.network, cuts)[world.rank]
        for_evaluation = cut_stages(made.network.eval(), cuts)[world.rank]
        with StageRunner(stage, world) as runner:
            found = []
            for number in range(2):
                step = Step(made, stage.module, number)
                made.network.train()
                each_leaf(step, stage.module, in_stages(step, runner, range(NUM_LEAVES)))
                made.network.eval()
                outputs = runner.outputs(for_evaluation, range(NUM_LEAVES), step.inputs)
                known = [each for _, each in outputs if each is not None]
                assert all(each["side"] is None for each in known)  # as the head is not called
                found.append([each["out"] for each in known])
            return found[0], found[1]


def test_outputs_in_evaluation(ranks: Ranks, one_thread: None) -> None:
    made = case("odd")
    network = made.network.eval()
    expected = []
    for number in range(2):
        step = Step(made, network, number)
        with torch.no_grad():
            expected.append([network(step.inputs(leaf))["out"] for leaf in range(NUM_LEAVES)])
    *others, last = ranks.shared(3, evaluated, ["act", "last"])
    assert others == [([], []), ([], [])]
    for own, wanted in zip(last, expected, strict=True):
        assert all(map(torch.equal, own, wanted))
        assert len(own) == len(wanted)


class Seen(nn.Module):
    """Counts the micro-batches whose activations are there."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)
        self.seen: list[StorageWeakRef] = []
        self.most = 0

    def forward(self, x: Tensor) -> Tensor:
        activation = torch.tanh(self.inner(x))
        self.seen.append(StorageWeakRef(activation.untyped_storage()))  # type: ignore[no-untyped-call]
        self.most = max(self.most, sum(not each.expired() for each in self.seen))  # type: ignore[no-untyped-call]
        result: Tensor = self.outer(activation)
        return result


class Plain:
    """Micro-batches of random numbers."""

    def inputs(self, leaf: int) -> Tensor:
        return torch.randn(2, 4)

    def loss(self, leaf: int, outputs: Tensor) -> Tensor:
        return outputs.sum()

    def end(self, leaf: int) -> None:
        pass


def held(order: str) -> int:
    with join("cpu") as world:
        network = nn.Sequential(*[Seen() for _ in range(world.world_size)])
        stage = cut_stages(network, [str(k) for k in range(1, world.world_size)])[world.rank]
        with StageRunner(stage, world, order) as runner:
            for ready in runner.run(range(NUM_LEAVES), Plain()):
                assert ready.root is not None
                torch.autograd.backward(ready.root)
        module = stage.module.get_submodule(str(world.rank))
        assert isinstance(module, Seen)
        return module.most


@pytest.mark.parametrize("order", ORDERS)
def test_as_many_activations_are_held_as_the_order_says(ranks: Ranks, order: str) -> None:
    expected = [most_held(ORDERS[order](4, NUM_LEAVES, stage)) for stage in range(4)]
    assert ranks.shared(4, held, order) == expected


class Noisy(nn.Module):
    """A layer that draws from python's generator."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * (1 + random.random())


class Ones(MicroBatches[None]):
    def inputs(self, leaf: int) -> Tensor:
        return torch.ones(2, 4)

    def loss(self, leaf: int, outputs: Tensor) -> Tensor:
        return outputs.sum()

    def end(self, leaf: int) -> None:
        return None


def drawn_in_stages(place: int) -> str:
    """What is said of a network of two stages, one of which draws."""
    layers: list[nn.Module] = [nn.Linear(4, 4), nn.Linear(4, 4)]
    layers.insert(place, Noisy())
    with join("cpu") as world:
        stage = cut_stages(nn.Sequential(*layers), ["1" if place else "2"])[world.rank]
        with StageRunner(stage, world) as runner:
            try:
                for ready in runner.run([0], Ones()):
                    assert ready.root is not None
                    ready.root.backward()  # type: ignore[no-untyped-call]
            except (RecipeError, PeerLostError) as error:
                return str(error)
    return ""


def test_a_later_stage_draws_from_torch_s_generator_alone(ranks: Ranks) -> None:
    assert ranks.run(2, drawn_in_stages, 0) == ["", ""]
    _, said = ranks.run(2, drawn_in_stages, 2)
    assert "layers of stage 1 draw from python's random" in said
