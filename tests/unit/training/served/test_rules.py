"""Each rule on a quadratic, under a fixed list of late gradients, against a loop in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from firecaffe.data import TensorDataset
from firecaffe.recipe.config import TrainConfig
from firecaffe.solvers.delayed_nesterov import DelayedNesterov
from firecaffe.synchrony.config import SynchronyConfig
from firecaffe.synchrony.leaf_queue import Leaf
from tests.unit.training.served.made import CURVATURE, Made, Quadratic, late, quadratic_loss

SAMPLES = torch.linspace(-1, 1, 36).reshape(12, 3)
RATE = 0.1
STALENESS = [0, 1, 2, 0, 3, 1, 0, 2, 5, 1, 4, 0]
"""Of the twelve leaves of one sample each; none before version 0."""

LEAVES = [Leaf(step, place) for step in range(3) for place in range(4)]


def made(optimizer: Callable[[nn.Parameter], optim.Optimizer] | None = None) -> Made:
    net = Quadratic()
    data = TensorDataset(SAMPLES, torch.zeros(12, dtype=torch.int64))
    config = TrainConfig(global_batch_size=4, micro_batch_size=1, seed=3)
    chosen = optim.SGD(net.parameters(), 1.0) if optimizer is None else optimizer(net.w)
    return Made(net, data, config, chosen, quadratic_loss)


def train(parts: Made, groups: list[list[tuple[Leaf, int]]], **words: Any) -> Tensor:
    stepper = parts.served(SynchronyConfig("asynchronous", **words), late(groups), 3)
    for step in range(3):
        stepper.run(step, RATE).read()
    parts.reducer.close()
    return parts.named["w"].detach().double()


class Loop:
    """The same by hand: weights of all versions, and gradients at any of them."""

    def __init__(self, parts: Made) -> None:
        self.order = parts.order
        self.w = [torch.tensor([1.0, -2.0, 0.5]).double()]

    def gradient(self, leaf: Leaf, staleness: int) -> Tensor:
        x = SAMPLES[self.order.micro_batch(*leaf)].double().mean(0)
        return CURVATURE.double() * (self.w[-1 - staleness] - x)

    def step(self, change: Tensor) -> None:
        self.w.append(self.w[-1] - RATE * change)


SINGLE = [[(leaf, tau)] for leaf, tau in zip(LEAVES, STALENESS, strict=True)]


def test_downpour() -> None:
    """W <- W - a g(W of τ updates ago)."""
    parts = made()
    loop = Loop(parts)
    for [(leaf, tau)] in SINGLE:
        loop.step(loop.gradient(leaf, tau))
    torch.testing.assert_close(train(parts, SINGLE), loop.w[-1], rtol=1e-5, atol=1e-6)


def test_softsync_by_staleness() -> None:
    """The mean of three gradients, each divided by its own τ (by 1 for τ = 0)."""
    parts = made()
    loop = Loop(parts)
    taus = [[0, 0, 0], [0, 1, 1], [2, 1, 0], [3, 2, 0]]
    groups = [
        [(LEAVES[3 * row + place], tau) for place, tau in enumerate(each)]
        for row, each in enumerate(taus)
    ]
    for group in groups:
        loop.step(
            sum((loop.gradient(*each) / max(each[1], 1) for each in group), torch.zeros(3)) / 3
        )
    found = train(parts, groups, staleness_rate="inverse", gradients_per_update=3)
    torch.testing.assert_close(found, loop.w[-1], rtol=1e-5, atol=1e-6)


def test_delay_compensation() -> None:
    parts = made()
    loop, square = Loop(parts), torch.zeros(3).double()
    for [(leaf, tau)] in SINGLE:
        g = loop.gradient(leaf, tau)
        square = 0.95 * square + 0.05 * g * g
        weight = 2 / (square + 1e-7).sqrt()
        loop.step(g + weight * g * g * (loop.w[-1] - loop.w[-1 - tau]))
    found = train(parts, SINGLE, compensate="delay")
    torch.testing.assert_close(found, loop.w[-1], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(found, train(made(), SINGLE), atol=1e-2)


def test_gap_aware() -> None:
    parts = made()
    loop, total, count = Loop(parts), 0.0, 0
    for [(leaf, tau)] in SINGLE:
        g = loop.gradient(leaf, tau)
        gap = (loop.w[-1] - loop.w[-1 - tau]).square().mean().sqrt()
        if count:
            g = g / (1 + gap / (total / (1 - 0.999**count)))
        loop.step(g)
        moved = float((loop.w[-1] - loop.w[-2]).square().mean().sqrt())
        total, count = 0.999 * total + 0.001 * moved, count + 1
    found = train(parts, SINGLE, compensate="gap")
    torch.testing.assert_close(found, loop.w[-1], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(found, train(made(), SINGLE), atol=1e-2)


@pytest.mark.parametrize(
    "words", [{"compensate": "delay"}, {"compensate": "gap"}, {"staleness_rate": "inverse"}]
)
def test_no_rule_changes_a_gradient_that_is_not_late(words: dict[str, Any]) -> None:
    fresh = [[(leaf, 0)] for leaf in LEAVES]
    assert torch.equal(train(made(), fresh, **words), train(made(), fresh))


def test_momentum_at_the_server_is_in_each_update() -> None:
    parts = made(lambda w: optim.SGD([w], 1.0, momentum=0.9))
    loop, v = Loop(parts), torch.zeros(3).double()
    for [(leaf, tau)] in SINGLE:
        v = 0.9 * v + loop.gradient(leaf, tau)
        loop.step(v)
    torch.testing.assert_close(train(parts, SINGLE), loop.w[-1], rtol=1e-5, atol=1e-6)


def test_delayed_nesterov() -> None:
    """Four learners: momentum in every fourth update, of the sum of four gradients."""
    parts = made(lambda w: DelayedNesterov([{"params": [w], "weight_decay": 0.0}], 1.0, 0.9, 4))
    loop, m, d = Loop(parts), torch.zeros(3).double(), torch.zeros(3).double()
    for place, [(leaf, tau)] in enumerate(SINGLE):
        g = loop.gradient(leaf, tau)
        d = d + g
        if place % 4 == 3:
            m, d = 0.9 * m + d, torch.zeros(3).double()
            g = g + 0.9 * m
        loop.step(g)
    found = train(parts, SINGLE, server_momentum="delayed_nesterov", learners=4)
    torch.testing.assert_close(found, loop.w[-1], rtol=1e-5, atol=1e-6)


def test_delayed_nesterov_is_nesterov_on_the_mean() -> None:
    """At the same gradients: N updates are one of torch's, at N times the rate."""
    ours, other = (nn.Parameter(torch.tensor([1.0, -2.0])) for _ in range(2))
    delayed = DelayedNesterov([{"params": [ours], "weight_decay": 0.0}], 0.1, 0.9, 5)
    nesterov = optim.SGD([other], 0.5, momentum=0.9, nesterov=True)
    generator = torch.Generator().manual_seed(1)
    for _ in range(6):
        gradients = torch.randn(5, 2, generator=generator)
        for gradient in gradients:
            ours.grad = gradient
            delayed.step()
        other.grad = gradients.mean(0)
        nesterov.step()
        torch.testing.assert_close(ours, other)


def test_delayed_by_one_it_is_torch_s_nesterov() -> None:
    ours, other = (nn.Parameter(torch.tensor([1.0, -2.0])) for _ in range(2))
    delayed = DelayedNesterov([{"params": [ours], "weight_decay": 0.01}], 0.1, 0.9, 1)
    nesterov = optim.SGD([other], 0.1, momentum=0.9, nesterov=True, weight_decay=0.01)
    generator = torch.Generator().manual_seed(1)
    for _ in range(6):
        ours.grad = torch.randn(2, generator=generator)
        other.grad = ours.grad.clone()
        delayed.step()
        nesterov.step()
        torch.testing.assert_close(ours, other)
