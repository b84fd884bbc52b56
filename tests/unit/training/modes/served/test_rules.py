"""Each rule on a quadratic, under a fixed list of late gradients, against a loop in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from firecaffe.solvers.caffe_solvers import DelayedNesterov
from firecaffe.synchrony.config import SynchronyConfig
from firecaffe.synchrony.server_policies import Leaf
from tests.kit.training_steps import Worker
from tests.unit.training.modes.served.made import CURVATURE, late, quadratic, served

RATE = 0.1
STALENESS = [0, 1, 2, 0, 3, 1, 0, 2, 5, 1, 4, 0]
"""Of the twelve leaves of one sample each; none before version 0."""

LEAVES = [Leaf(step, place) for step in range(3) for place in range(4)]
SINGLE = [[(leaf, tau)] for leaf, tau in zip(LEAVES, STALENESS, strict=True)]


def train(parts: Worker, groups: list[list[tuple[Leaf, int]]], **words: Any) -> Tensor:
    stepper = served(parts, SynchronyConfig("asynchronous", **words), late(groups), 3)
    for step in range(3):
        stepper.run(step, RATE).read()
    parts.reducer.close()
    return parts.named["w"].detach().double()


class Loop:
    """The same by hand: weights of all versions, and gradients at any of them."""

    def __init__(self, optimizer: Any = None) -> None:
        self.parts = quadratic(optimizer)
        self.w = [torch.tensor([1.0, -2.0, 0.5]).double()]

    def gradient(self, leaf: Leaf, staleness: int) -> Tensor:
        x = self.parts.data.inputs[self.parts.order.micro_batch(*leaf)].double().mean(0)
        gradient: Tensor = CURVATURE.double() * (self.w[-1 - staleness] - x)
        return gradient

    def step(self, change: Tensor) -> None:
        self.w.append(self.w[-1] - RATE * change)

    def check(self, groups: Any = SINGLE, **words: Any) -> None:
        trained = train(self.parts, groups, **words)
        torch.testing.assert_close(trained, self.w[-1], rtol=1e-5, atol=1e-6)
        if "compensate" in words:
            assert not torch.allclose(trained, train(quadratic(), groups), atol=1e-2)


def test_downpour() -> None:
    """W <- W - a g(W of τ updates ago)."""
    loop = Loop()
    for [(leaf, tau)] in SINGLE:
        loop.step(loop.gradient(leaf, tau))
    loop.check()


def test_softsync_by_staleness() -> None:
    """The mean of three gradients, each divided by its own τ (by 1 for τ = 0)."""
    loop, taus = Loop(), [0, 0, 0, 0, 1, 1, 2, 1, 0, 3, 2, 0]
    pairs = list(zip(LEAVES, taus, strict=True))
    groups = [pairs[place : place + 3] for place in range(0, 12, 3)]
    for group in groups:
        scaled = [loop.gradient(leaf, tau) / max(tau, 1) for leaf, tau in group]
        loop.step(torch.stack(scaled).mean(0))
    loop.check(groups, staleness_rate="inverse", gradients_per_update=3)


def test_delay_compensation() -> None:
    loop, square = Loop(), torch.zeros(3).double()
    for [(leaf, tau)] in SINGLE:
        g = loop.gradient(leaf, tau)
        square = 0.95 * square + 0.05 * g * g
        weight = 2 / (square + 1e-7).sqrt()
        loop.step(g + weight * g * g * (loop.w[-1] - loop.w[-1 - tau]))
    loop.check(compensate="delay")


def test_gap_aware() -> None:
    loop, total, count = Loop(), 0.0, 0
    for [(leaf, tau)] in SINGLE:
        g = loop.gradient(leaf, tau)
        gap = (loop.w[-1] - loop.w[-1 - tau]).square().mean().sqrt()
        if count:
            g = g / (1 + gap / (total / (1 - 0.999**count)))
        loop.step(g)
        moved = float((loop.w[-1] - loop.w[-2]).square().mean().sqrt())
        total, count = 0.999 * total + 0.001 * moved, count + 1
    loop.check(compensate="gap")


@pytest.mark.parametrize(
    "words", [{"compensate": "delay"}, {"compensate": "gap"}, {"staleness_rate": "inverse"}]
)
def test_no_rule_changes_a_gradient_that_is_not_late(words: dict[str, Any]) -> None:
    fresh = [[(leaf, 0)] for leaf in LEAVES]
    assert torch.equal(train(quadratic(), fresh, **words), train(quadratic(), fresh))


def test_momentum_at_the_server_is_in_each_update() -> None:
    loop = Loop(lambda w: optim.SGD([w], 1.0, momentum=0.9))
    v = torch.zeros(3).double()
    for [(leaf, tau)] in SINGLE:
        v = 0.9 * v + loop.gradient(leaf, tau)
        loop.step(v)
    loop.check()


def delayed(weight: nn.Parameter, rate: float, count: int, decay: float = 0.0) -> DelayedNesterov:
    return DelayedNesterov([{"params": [weight], "weight_decay": decay}], rate, 0.9, count)


def test_delayed_nesterov() -> None:
    """Four learners: momentum in every fourth update, of the sum of four gradients."""
    loop = Loop(lambda w: delayed(w, 1.0, 4))
    m, d = torch.zeros(3).double(), torch.zeros(3).double()
    for place, [(leaf, tau)] in enumerate(SINGLE):
        g = loop.gradient(leaf, tau)
        d = d + g
        if place % 4 == 3:
            m, d = 0.9 * m + d, torch.zeros(3).double()
            g = g + 0.9 * m
        loop.step(g)
    loop.check(server_momentum="delayed_nesterov", learners=4)


@pytest.mark.parametrize(("count", "decay"), [(5, 0.0), (1, 0.01)])
def test_delayed_nesterov_is_torch_s_on_the_mean(count: int, decay: float) -> None:
    """At the same gradients: N updates are one of torch's, at N times the rate."""
    ours, other = (nn.Parameter(torch.tensor([1.0, -2.0])) for _ in range(2))
    by_count = delayed(ours, 0.1, count, decay)
    words: dict[str, Any] = {"momentum": 0.9, "nesterov": True, "weight_decay": decay}
    nesterov = optim.SGD([other], 0.1 * count, **words)
    generator = torch.Generator().manual_seed(1)
    for _ in range(6):
        gradients = torch.randn(count, 2, generator=generator)
        for gradient in gradients:
            ours.grad = gradient.clone()
            by_count.step()
        other.grad = gradients.mean(0)
        nesterov.step()
        torch.testing.assert_close(ours, other)
