"""Update rules over lists of weights that torch lacks: Caffe's, delayed Nesterov, LARS and LAMB;
and outer optimizers, which apply an average of replicas by torch's SGD.

Adam:
    m = b1 m + (1 - b1) g          w = w - rate sqrt(1 - b2^t) / (1 - b1^t) m / (sqrt(v) + delta)
    v = b2 v + (1 - b2) g^2

Adam's paper, and torch, correct v before it takes the root. Compared with that, delta is
divided by sqrt(1 - b2^t) here, so that it starts 32 times as large at b2 = 0.999. Source:
`AdamSolver` in BVLC Caffe; Kingma and Ba 2015, the end of section 2.

SGD, and Nesterov:
    h = momentum h + rate (gradient + decay w)        w = w - h
    nesterov:  w = w - ((1 + momentum) h - momentum h_before)

torch's SGD keeps the rate outside, so a lower rate at once also shrinks the momentum that was
collected at a higher rate. Momentum correction first multiplies h by the new rate over the previous
one. Then the two forms are equal except for rounding. Source: `SGDSolver` and `NesterovSolver` in
BVLC Caffe; the correction: Goyal et al. 2017, section 3.

Delayed Nesterov:
    each update     d = d + g;  w = w - rate g
    the N-th        m = β m + d;  w = w - rate (g + β m);  d = 0

At a server that receives gradients late, momentum in each update follows gradients that are N
updates old, which is the usual cause of divergence. Here the updates in between have no momentum.
N updates together are one Nesterov update on the mean of N gradients, at N times the rate. N = 1 is
torch's Nesterov. Source: Liu et al. 2024 (docs/explanation/synchrony.md), algorithm 3 with c = 0.

LARS and LAMB, with a learning rate for each layer, for large batches:
    LARS:  t = trust |w| / (|g| + decay |w|)     v = momentum v + rate t (g + decay w)     w = w - v
    LAMB:  r = m' / (sqrt(v') + delta) + decay w                   w = w - rate |w| / |r| r

The rate of a tensor is scaled by the length of its weights over that of its update, so that no
layer moves by more than a share of itself. Tensors of one dimension (biases, normalization) use the
plain rate, as in all published large-batch recipes. Libraries differ in this, or in the scale.
m' and v' are Adam's corrected means. If a length is 0, the scale is 1. Source: You, Gitman and
Ginsburg 2017, arXiv 1708.03888, algorithm 1; You et al. 2020, arXiv 1904.00962, algorithm 2.

Outer optimizers, on the outer gradient D:
    average     x = x - D                                      the replicas' mean
    slowmo      u = b u + D / a;  x = x - r a u
    nesterov    u = b u + D;      x = x - r (D + b u)

Replicas began with the weights x, and D is x minus the mean of their weights. The learning rate is
a, the outer rate r > 0, the outer momentum b. With r = 1 and b = 0, slowmo and nesterov become
`average`. Source: Wang et al. 2020 (SlowMo), algorithm 1; Douillard et al. 2023 (DiLoCo; r = 0.7,
b = 0.9). Their titles are in docs/explanation/synchrony.md.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, optim

Group = dict[str, Any]
"""Settings of some weights, as "lr"; and the weights, as "params"."""
Groups = Iterable[Group] | Iterable[Tensor]
Tensors = list[Tensor]
Betas = tuple[float, float]


def trained(optimizer: optim.Optimizer) -> Iterator[tuple[Group, Tensors, Tensors]]:
    """Yield each group that has gradients, its weights that have one, and these gradients."""
    for group in optimizer.param_groups:
        weights = [weight for weight in group["params"] if weight.grad is not None]
        if weights:
            yield group, weights, [weight.grad for weight in weights]


class GroupedOptimizer(optim.Optimizer):
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group, weights, gradients in trained(self):
            self.update(group, weights, gradients)

    def update(self, group: Group, weights: Tensors, gradients: Tensors) -> None:
        raise NotImplementedError


State = dict[str, Any]


def kept(state: State, name: str, like: Tensor) -> Tensor:
    if name not in state:
        state[name] = torch.zeros_like(like)
    value: Tensor = state[name]
    return value


def counted(state: State) -> int:
    state["step"] = state.get("step", 0) + 1
    return int(state["step"])


def moments(states: Sequence[State], gradients: Tensors, betas: Betas) -> tuple[Tensors, Tensors]:
    """Update the means of gradients and of their squares (Kingma and Ba 2015, algorithm 1)."""
    beta1, beta2 = betas
    pairs = list(zip(states, gradients, strict=True))
    means = [kept(state, "mean", gradient) for state, gradient in pairs]
    squares = [kept(state, "square", gradient) for state, gradient in pairs]
    torch._foreach_lerp_(means, gradients, 1 - beta1)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
    return means, squares


class CaffeAdam(GroupedOptimizer):
    """Adam in Caffe's form, by lr, betas, delta and weight_decay, a part of the gradient."""

    def update(self, group: Group, weights: Tensors, gradients: Tensors) -> None:
        beta1, beta2 = group["betas"]
        if group["weight_decay"]:
            added = torch._foreach_add(gradients, weights, alpha=group["weight_decay"])
            gradients = list(added)
        states = [self.state[weight] for weight in weights]
        means, squares = moments(states, gradients, group["betas"])
        steps = [counted(state) for state in states]
        moved = list(torch._foreach_sqrt(squares))
        torch._foreach_add_(moved, group["delta"])
        rates = [-group["lr"] * math.sqrt(1 - beta2**step) / (1 - beta1**step) for step in steps]
        torch._foreach_addcdiv_(weights, means, moved, rates)


class CaffeSGD(GroupedOptimizer):
    """SGD in Caffe's form. `nesterov` and `correction` hold for all groups."""

    def __init__(
        self,
        params: Groups,
        lr: float,
        momentum: float,
        weight_decay: float,
        nesterov: bool = False,
        correction: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.nesterov, self.correction = nesterov, correction

    def update(self, group: Group, weights: Tensors, gradients: Tensors) -> None:
        rate, momentum = group["lr"], group["momentum"]
        moved = torch._foreach_add(gradients, weights, alpha=group["weight_decay"])
        torch._foreach_mul_(moved, rate)
        histories = [self._history(weight, rate) for weight in weights]
        before: Tensors = []
        if self.nesterov:
            before = list(torch._foreach_mul(histories, momentum))
        torch._foreach_mul_(histories, momentum)
        torch._foreach_add_(histories, moved)
        if self.nesterov:
            ahead = torch._foreach_mul(histories, 1 + momentum)
            torch._foreach_sub_(ahead, before)
            torch._foreach_sub_(weights, ahead)
        else:
            torch._foreach_sub_(weights, histories)

    def _history(self, weight: Tensor, rate: float) -> Tensor:
        state = self.state[weight]
        history = kept(state, "history", weight)
        if self.correction:
            before = state.get("rate", rate)
            if before not in (rate, 0.0):
                history.mul_(rate / before)
            state["rate"] = rate
        return history


class DelayedNesterov(GroupedOptimizer):
    """SGD with delayed Nesterov momentum, by lr (of one gradient), momentum, and every (N)."""

    def update(self, group: Group, weights: Tensors, gradients: Tensors) -> None:
        for weight, gradient in zip(weights, gradients, strict=True):
            moved = gradient
            if group["weight_decay"]:
                moved = moved.add(weight, alpha=group["weight_decay"])
            state = self.state[weight]
            momentum = kept(state, "momentum_buffer", weight)
            delayed = kept(state, "delayed", weight)
            state["updates"] = state.get("updates", 0) + 1
            delayed.add_(moved)
            if state["updates"] >= group["every"]:
                momentum.mul_(group["momentum"]).add_(delayed)
                moved = moved.add(momentum, alpha=group["momentum"])
                delayed.zero_()
                state["updates"] = 0
            weight.add_(moved, alpha=-group["lr"])


def set_delay(optimizer: optim.Optimizer, every: int) -> None:
    for group in optimizer.param_groups:
        if "every" in group:
            group["every"] = every


Lengths = list[tuple[Tensor, Tensor]]
"""The L2 norms of each weight and of its direction."""

Norms = Callable[[Sequence[Tensor], Sequence[Sequence[Tensor]]], Sequence[Sequence[Tensor]]]
"""(weights, lists like them) -> the scalar L2 norms of each list, always of whole tensors."""


def own_norms(_: Sequence[Tensor], lists: Sequence[Sequence[Tensor]]) -> Sequence[Sequence[Tensor]]:
    return [torch._foreach_norm(list(tensors)) if tensors else [] for tensors in lists]


class LayerRates(optim.Optimizer, ABC):
    """An optimizer that asks for all norms at once, so that ranks with parts can exchange them."""

    _norms: Norms = staticmethod(own_norms)

    def take_norms(self, norms: Norms) -> None:
        self._norms = norms

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        updates = [
            (group, weights, self.directions(group, weights, gradients))
            for group, weights, gradients in trained(self)
        ]
        every = [weight for _, weights, _ in updates for weight in weights]
        directions = [direction for _, _, of_group in updates for direction in of_group]
        lengths = zip(*self._norms(every, [every, directions]), strict=True)
        of_weights = dict(zip(every, lengths, strict=True))
        for group, weights, of_group in updates:
            self.update(group, weights, of_group, [of_weights[weight] for weight in weights])

    @abstractmethod
    def directions(self, group: Group, weights: Tensors, gradients: Tensors) -> Tensors:
        """Return the directions in which the weights would move. Their lengths decide the rates."""

    @abstractmethod
    def update(
        self, group: Group, weights: Tensors, directions: Tensors, lengths: Lengths
    ) -> None: ...


class Lars(LayerRates):
    """LARS, by lr, momentum, weight_decay and trust."""

    def directions(self, group: Group, weights: Tensors, gradients: Tensors) -> Tensors:
        return gradients

    def update(self, group: Group, weights: Tensors, directions: Tensors, lengths: Lengths) -> None:
        decay = group["weight_decay"]
        moved = torch._foreach_add(directions, weights, alpha=decay)
        rates = [
            group["lr"]
            * _ratio(
                group["trust"] * weight_length,
                direction_length + decay * weight_length,
                weight.ndim,
            )
            for weight, (weight_length, direction_length) in zip(weights, lengths, strict=True)
        ]
        torch._foreach_mul_(moved, rates)
        velocities = [kept(self.state[weight], "velocity", weight) for weight in weights]
        torch._foreach_mul_(velocities, group["momentum"])
        torch._foreach_add_(velocities, moved)
        torch._foreach_sub_(weights, velocities)


class Lamb(LayerRates):
    """LAMB, by lr, betas, delta and weight_decay."""

    def directions(self, group: Group, weights: Tensors, gradients: Tensors) -> Tensors:
        beta1, beta2 = group["betas"]
        states = [self.state[weight] for weight in weights]
        means, squares = moments(states, gradients, group["betas"])
        steps = [counted(state) for state in states]
        roots = torch._foreach_div(squares, [1 - beta2**step for step in steps])
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, group["delta"])
        updates = torch._foreach_div(means, [1 - beta1**step for step in steps])
        torch._foreach_div_(updates, roots)
        torch._foreach_add_(updates, weights, alpha=group["weight_decay"])
        return list(updates)

    def update(self, group: Group, weights: Tensors, directions: Tensors, lengths: Lengths) -> None:
        rates = [
            group["lr"] * _ratio(weight_length, direction_length, weight.ndim)
            for weight, (weight_length, direction_length) in zip(weights, lengths, strict=True)
        ]
        torch._foreach_mul_(directions, rates)
        torch._foreach_sub_(weights, directions)


def _ratio(numerator: Tensor, denominator: Tensor, dimensions: int) -> Tensor:
    if dimensions < 2:
        return torch.ones_like(numerator)
    return torch.where(
        (numerator > 0) & (denominator > 0), numerator / denominator, torch.ones_like(numerator)
    )


OUTER = {"average": (1.0, 0.0), "slowmo": (1.0, 0.5), "nesterov": (0.7, 0.9)}
"""The outer optimizers, each with its default rate and momentum."""


class Outer:
    """Updates weights whose `grad` is the outer gradient. `optimizer` holds the momentum."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        kind: str,
        rate: float | None = None,
        momentum: float | None = None,
    ) -> None:
        usual_rate, usual_momentum = OUTER[kind]
        if kind == "average":
            rate = momentum = None
        self._rate = usual_rate if rate is None else rate
        momentum = usual_momentum if momentum is None else momentum
        self._is_slowmo = kind == "slowmo"
        nesterov = kind == "nesterov" and momentum > 0
        self.optimizer = optim.SGD(
            parameters, self._rate, momentum, nesterov=nesterov, foreach=True
        )

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Update the weights. `learning_rate` is the present one of the replicas."""
        for group, weights, gradients in trained(self.optimizer) if self._is_slowmo else ():
            if learning_rate == 0:  # D / a has no value
                torch._foreach_sub_(weights, gradients)
                return
            torch._foreach_div_(gradients, learning_rate)
            group["lr"] = self._rate * learning_rate
        self.optimizer.step()
