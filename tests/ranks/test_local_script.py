"""`firecaffe.adapt.average_locally` in one's own loop, against torch's and loops written out."""

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

import firecaffe
from firecaffe.cluster.world import World, join
from firecaffe.errors import AgreementError, CheckpointError, RecipeError
from tests.unit.training.modes.local.test_trainings import RATE, outer_step
from tests.world import Ranks

RANKS, EVERY, STEPS = 3, 3, 8


class Net(nn.Module):
    def __init__(self, start: int = 0) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(5, 7), nn.BatchNorm1d(7)
        self.head = nn.Linear(7, 3)
        generator = torch.Generator().manual_seed(start)
        with torch.no_grad():
            for each in (*self.first.parameters(), *self.head.parameters()):
                each.copy_(torch.randn(each.shape, generator=generator))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.norm(self.first(inputs)).tanh())
        return outputs


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(6, 5, generator=torch.Generator().manual_seed(100 * step + rank))
    return inputs, inputs[:, :3].argmax(1)


def step_of(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    rank: int,
    scaler: GradScaler | None = None,
) -> None:
    """With a scaler, rank 1 meets a gradient that is not finite in the step 1."""
    inputs, labels = batch(step, rank)
    optimizer.zero_grad()
    loss = F.cross_entropy(net(inputs), labels)
    if scaler is None:
        torch.autograd.backward(loss)
        optimizer.step()
        return
    torch.autograd.backward(scaler.scale(loss))
    if (step, rank) == (1, 1):
        next(p.grad for p in net.parameters() if p.grad is not None).fill_(float("inf"))
    scaler.step(optimizer)
    scaler.update()


def tensors(net: nn.Module) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in net.state_dict().items()}


class Loop:
    """A rank's network, optimizer and averages. start: of ranks but the first, which others take
    over.
    """

    def __init__(self, world: World, start: int = 0, **words: Any) -> None:
        self.rank, self.net = world.rank, Net(start * world.rank)
        self.optimizer = torch.optim.SGD(self.net.parameters(), RATE, 0.9)
        words = {"every": EVERY, "process_group": world.group, **words}
        self.replicas = firecaffe.adapt.average_locally(self.net, self.optimizer, **words)

    def step(self, step: int, scaler: GradScaler | None = None) -> None:
        step_of(self.net, self.optimizer, step, self.rank, scaler)


def fit(words: dict[str, Any], steps: int = STEPS, start: int = 0) -> dict[str, Tensor]:
    with join("cpu") as world:
        loop = Loop(world, start, **words)
        for step in range(steps):
            loop.step(step)
        loop.replicas.average()
        loop.replicas.detach()
        return tensors(loop.net)


def fit_by_torch() -> dict[str, Tensor]:
    with join("cpu") as world:
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), RATE, 0.9)
        averager = PeriodicModelAverager(EVERY, EVERY - 1, world.group)
        for step in range(2 * EVERY):
            step_of(net, optimizer, step, world.rank)
            averager.average_parameters(net.parameters())
        return tensors(net)


def test_weights_are_those_of_torchs_averager(ranks: Ranks) -> None:
    """BatchNorm's statistics are averaged beside, which torch leaves to each rank."""
    expected = ranks.shared(RANKS, fit_by_torch)
    averaged = ranks.shared(RANKS, fit, {}, 2 * EVERY, 7)
    for of_rank in averaged:
        for name, _ in Net().named_parameters():
            torch.testing.assert_close(of_rank[name], expected[0][name], rtol=1e-4, atol=1e-5)
        assert all(torch.equal(of_rank[name], averaged[0][name]) for name in of_rank)
    assert averaged[0]["norm.num_batches_tracked"] == 2 * EVERY
    assert not torch.allclose(expected[0]["norm.running_mean"], expected[1]["norm.running_mean"])


def written_out(outer: str, rate: float, momentum: float, zero: bool) -> dict[str, Tensor]:
    """The same in one process; the last average comes after fewer steps."""
    nets = [Net() for _ in range(RANKS)]
    optimizers = [torch.optim.SGD(net.parameters(), RATE, 0.9) for net in nets]
    start = {name: each.detach().clone() for name, each in Net().named_parameters()}
    slow = {name: torch.zeros_like(each) for name, each in start.items()}
    for step in range(STEPS):
        for rank, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            step_of(net, optimizer, step, rank)
        if (step + 1) % EVERY and step + 1 < STEPS:
            continue
        for name, x in start.items():
            weights = [net.get_parameter(name).detach() for net in nets]
            difference = x - torch.stack(weights).mean(0)
            start[name], slow[name] = outer_step(x, slow[name], difference, outer, rate, momentum)
            for weight in weights:
                weight.copy_(start[name])
        for optimizer in optimizers if zero else ():
            optimizer.state.clear()
    return start


SLOWMO = {"outer": "slowmo", "outer_momentum": 0.4, "inner_momentum": "zero"}


@pytest.mark.parametrize(
    ("words", "rule"),
    [({"outer": "nesterov"}, ("nesterov", 0.7, 0.9, False)), (SLOWMO, ("slowmo", 1.0, 0.4, True))],
    ids=["nesterov", "slowmo"],
)
def test_outer_optimizers(
    ranks: Ranks, words: dict[str, Any], rule: tuple[str, float, float, bool]
) -> None:
    averaged = ranks.shared(RANKS, fit, words)
    for name, each in written_out(*rule).items():
        torch.testing.assert_close(averaged[0][name], each, rtol=1e-4, atol=1e-5)


def fit_each(many: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
    return [fit(words) for words in many]


def test_any_exchange_and_codec(ranks: Ranks) -> None:
    """The tree's order gives the same bits; a codec gives about the same weights on all ranks."""
    named = ({"exchange": "tree"}, {"exchange": "halving_doubling"})
    many = [*named, {}, {"compressor": "bfloat16"}]
    for tree, other, chosen, coded in ranks.shared(2, fit_each, many):
        for name, each in tree.items():
            assert torch.equal(other[name], each)
            assert torch.equal(chosen[name], each)
            torch.testing.assert_close(coded[name], each, rtol=0.1, atol=0.05)
        assert not torch.equal(coded["first.weight"], tree["first.weight"])


def go_on() -> None:
    """A loop that is left within a round goes on to the same bits."""
    ways: tuple[dict[str, Any], ...] = (
        *({}, {"inner_momentum": "zero"}),
        *({"compressor": "one_bit"}, {"compressor": "top_k"}),
    )
    for way in ways:
        words = {"outer": "nesterov", **way}
        whole = fit(words)
        with join("cpu") as world:
            begun, again = Loop(world, **words), Loop(world, **words)
            for step in range(4):
                begun.step(step)
            # After `average_locally`, which gives all ranks the first one's weights.
            again.net.load_state_dict(begun.net.state_dict())
            again.optimizer.load_state_dict(begun.optimizer.state_dict())
            again.replicas.load_state_dict(begun.replicas.state_dict())
            for step in range(4, STEPS):
                again.step(step)
            again.replicas.average()
            for name, each in tensors(again.net).items():
                assert torch.equal(each, whole[name]), (words, name)


def test_a_loop_goes_on_within_a_round(ranks: Ranks) -> None:
    ranks.shared(2, go_on)


def fit_scaled(is_told: bool) -> tuple[str, list[int], dict[str, Tensor]]:
    """What is said, the steps that were counted after each of the loop, and the weights."""
    scaler, counted = GradScaler("cpu", init_scale=4.0), list[int]()
    words: dict[str, Any] = {"scaler": scaler} if is_told else {}
    with join("cpu") as world:
        loop = Loop(world, **words)
        try:
            for step in range(STEPS):
                loop.step(step, scaler)
                counted.append(loop.replicas.steps)
            loop.replicas.average()
        except AgreementError as error:
            return str(error), counted, {}
        loop.replicas.detach()
        loop.step(STEPS, scaler)
        counted.append(loop.replicas.steps)
        loop.replicas.steps = 1
        loop.replicas.average()
        return "", counted, tensors(loop.net)


def test_a_step_that_a_scaler_leaves_out_on_one_rank_is_a_step(ranks: Ranks) -> None:
    first, second = ranks.shared(2, fit_scaled, True)
    # The average at the end, after two steps, and one that was not counted.
    assert first[:2] == second[:2] == ("", [1, 2, 0, 1, 2, 0, 1, 2, 0])
    assert all(torch.equal(each, second[2][name]) for name, each in first[2].items())
    assert all(each.isfinite().all() for each in first[2].values())


def test_a_scaler_that_was_not_told_of_hangs_nobody(ranks: Ranks) -> None:
    """Rank 1's average after nine steps meets the last one of rank 0, after two."""
    first, second = ranks.shared(2, fit_scaled, False)
    assert first[0] == second[0]
    assert "the steps since the last average" in first[0]
    assert "scaler=" in first[0]


def of_another_rank() -> list[str]:
    with join("cpu") as world:
        loop = Loop(world, every=1, compressor="one_bit")
        loop.step(0)
        state, said = loop.replicas.state_dict(), []
        other = {f"{1 - world.rank}.{k.partition('.')[2]}": v for k, v in state["memory"].items()}
        other_net = {**state["start"], "head.bias": torch.zeros(2)}
        wrong: list[Any] = [{**state, "memory": other}, tensors(loop.net), None]
        for each in (*wrong, {**state, "start": other_net}):
            with pytest.raises(CheckpointError) as caught:
                loop.replicas.load_state_dict(each)
            said.append(str(caught.value))
        return said


def test_a_state_of_another_rank_or_network_is_refused(ranks: Ranks) -> None:
    for rank, said in enumerate(ranks.shared(2, of_another_rank)):
        memory, of_net, nothing, other_net = said
        assert f"none of rank {rank}" in memory
        assert "expected what its state_dict() has given" in of_net
        assert "None" in nothing
        assert "head.bias is (2,), here (3,)" in other_net


def test_one_rank_alone(ranks: Ranks) -> None:
    """Its average is the weights themselves; an outer optimizer holds it back all the same."""
    (plain,) = ranks.shared(1, fit, {})
    (held,) = ranks.shared(1, fit, {"outer": "nesterov"})
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), RATE, 0.9)
    for step in range(STEPS):
        step_of(net, optimizer, step, 0)
    torch.testing.assert_close(plain, tensors(net), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(held["first.weight"], plain["first.weight"], atol=0.01)


def frozen_on_one(rank: int) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(rank == 0))


def given_otherwise(rank: int) -> list[tuple[nn.Module, dict[str, Any], str]]:
    """A network and words that cannot be, or that are not those of the other rank; what is said."""
    net = Net()
    return [
        (net, {"every": 0}, "every is 0"),
        (net, {"outer": "adam"}, "outer is 'adam'"),
        (net, {"outer": "nesterov", "outer_lr": 0.0}, "outer_lr is 0.0"),
        (net, {"outer": "nesterov", "outer_momentum": 1.0}, "outer_momentum is 1.0"),
        (net, {"outer_lr": 0.5}, "outer average has no outer_lr"),
        (net, {"inner_momentum": "average"}, "inner_momentum is 'average'"),
        (net, {"exchange": "star"}, "no exchange 'star'"),
        (nn.ReLU(), {}, "no parameter to train"),
        (DistributedDataParallel(Net()), {}, "give the network itself, model.module"),
        (net, {"every": 2 + rank}, "the words of average_locally"),
        (nn.Linear(2, 2 + rank), {}, "differs from the others in the model"),
        (frozen_on_one(rank), {}, "differs from the others in the model"),
    ]


def refusals() -> list[str]:
    rank, said = int(os.environ["RANK"]), []
    with join("cpu") as world:
        for model, words, part in given_otherwise(rank):
            optimizer = torch.optim.SGD([*model.parameters()] or [*Net().parameters()], RATE)
            with pytest.raises((RecipeError, AgreementError)) as caught:
                firecaffe.adapt.average_locally(
                    model, optimizer, process_group=world.group, **words
                )
            assert part in str(caught.value)
            said.append(str(caught.value))
    return said


def test_what_cannot_be_is_refused(ranks: Ranks) -> None:
    first, second = ranks.shared(2, refusals)
    assert first == second
