"""Optimizers of a user's own, as recipes name them."""

import random
from typing import Any

import numpy as np
import torch
from torch import optim

PLACE = f"{__name__}"


class Signs(optim.Optimizer):
    """Follows the signs of a mean of gradients, and slows down by a number that its groups keep."""

    def __init__(self, params: Any, lr: float, beta: float = 0.5, slow: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "slow": slow, "seen": (0, 0)})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["slow"] *= 0.9
            group["seen"] = (group["seen"][0] + 1, 0)
            for weight in group["params"]:
                state = self.state[weight]
                state.setdefault("mean", torch.zeros_like(weight))
                state.setdefault("row", torch.zeros(3))
                state["count"] = state.get("count", 0) + 1
                state["mean"].lerp_(weight.grad, 1 - group["beta"])
                weight.sub_(state["mean"].sign(), alpha=group["lr"] * group["slow"])


class Noisy(Signs):
    """Adds noise of the process's generators."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for weight in group["params"]:
                noise = torch.randn_like(weight) * random.random() * float(np.random.rand())
                weight.add_(noise, alpha=group["lr"])


class KeepsMore(Signs):
    """Has a list of tensors for each parameter."""

    def step(self) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight]["earlier"] = [weight.clone()]


class Wraps(Signs):
    """Has a state of its own beside torch's."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "slow_weights": []}


class Counts(Signs):
    """Counts its steps in an attribute."""

    steps = 0

    def step(self) -> None:  # type: ignore[override]
        super().step()
        self.steps += 1


class Holds(Signs):
    """Has attributes that stay, or hold what checkpoints have."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.weights = [weight for group in self.param_groups for weight in group["params"]]
        self.inner = optim.SGD(self.param_groups, lr)
        self.inner.param_groups = self.param_groups
        self.factor, self.rule, self.scales = 0.5, lambda: 3, torch.ones(3)


class Inner(Signs):
    """Leaves the update to another optimizer, as Lookahead does."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.inner = optim.SGD(self.param_groups, lr, momentum=0.9)
        self.param_groups = self.inner.param_groups

    def step(self) -> None:  # type: ignore[override]
        self.inner.step()
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight]["slow"] = weight.detach().clone()


def none(params: Any, lr: float) -> str:
    return "no optimizer"


def fails(params: Any, lr: float) -> None:
    raise ZeroDivisionError("of the user's own")


class OfVectors(Signs):
    """For networks without matrices."""

    def step(self) -> None:  # type: ignore[override]
        raise ValueError("takes vectors")
