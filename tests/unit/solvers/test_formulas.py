"""Each solver's updates of a matrix and a bias, against its formula in numpy.

Sources: the ComputeUpdateValue of each solver in BVLC Caffe, src/caffe/solvers; Kingma and Ba 2015,
algorithm 1 (adam); Loshchilov and Hutter 2019, algorithms 1 and 2 (decoupled decay, adamw); You et
al. 2017, algorithm 1 (lars); You et al. 2020, algorithm 2 (lamb).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from firecaffe.solvers.config import MAY_DECOUPLE, MAY_L1, SolverConfig
from firecaffe.solvers.optimizer import SOLVERS, make_optimizer, set_rate
from firecaffe.solvers.rate_policy import learning_rate

Array = npt.NDArray[np.float64]


@dataclass
class Kept:
    """Of one tensor: what its formula knows, and what it keeps from update to update."""

    c: SolverConfig
    w: Array
    decay: float
    rate: float = 0.0
    t: int = 0
    h: Array | float = 0.0
    d: Array | float = 0.0

    def means(self, g: Array) -> tuple[Any, Any]:
        """Adam's corrected means of the gradient and of its square."""
        a, b = self.c.momentum, self.c.momentum2
        self.h, self.d = a * self.h + (1 - a) * g, b * self.d + (1 - b) * g * g
        return self.h / (1 - a**self.t), self.d / (1 - b**self.t)

    def trust(self, numerator: Any, denominator: Any) -> Any:
        """A bias, and all else of one dimension, takes the plain rate."""
        return numerator / denominator if self.w.ndim > 1 else 1.0


def sgd(s: Kept, g: Array) -> Any:
    s.h = s.c.momentum * s.h + g
    return s.rate * s.h


def nesterov(s: Kept, g: Array) -> Any:
    s.h = s.c.momentum * s.h + g
    return s.rate * (g + s.c.momentum * s.h)


def caffe_sgd(s: Kept, g: Array) -> Any:
    s.h = s.c.momentum * s.h + s.rate * g
    return s.h


def caffe_nesterov(s: Kept, g: Array) -> Any:
    before = s.h
    s.h = s.c.momentum * before + s.rate * g
    return (1 + s.c.momentum) * s.h - s.c.momentum * before


def adagrad(s: Kept, g: Array) -> Any:
    s.h = s.h + g * g
    return s.rate * g / (np.sqrt(s.h) + s.c.delta)


def rmsprop(s: Kept, g: Array) -> Any:
    s.h = s.c.rms_decay * s.h + (1 - s.c.rms_decay) * g * g
    return s.rate * g / (np.sqrt(s.h) + s.c.delta)


def adadelta(s: Kept, g: Array) -> Any:
    s.h = s.c.momentum * s.h + (1 - s.c.momentum) * g * g
    moved = g * np.sqrt((s.d + s.c.delta) / (s.h + s.c.delta))
    s.d = s.c.momentum * s.d + (1 - s.c.momentum) * moved * moved
    return s.rate * moved


def adam(s: Kept, g: Array) -> Any:
    mean, square = s.means(g)
    return s.rate * mean / (np.sqrt(square) + s.c.delta)


def caffe_adam(s: Kept, g: Array) -> Any:
    s.means(g)
    correction = np.sqrt(1 - s.c.momentum2**s.t) / (1 - s.c.momentum**s.t)
    return s.rate * correction * s.h / (np.sqrt(s.d) + s.c.delta)


def adamw(s: Kept, g: Array) -> Any:
    return adam(s, g) + s.rate * s.decay * s.w


def lars(s: Kept, g: Array) -> Any:
    length = np.linalg.norm(s.w)
    trust = s.trust(s.c.trust * length, np.linalg.norm(g) + s.decay * length)
    s.h = s.c.momentum * s.h + s.rate * trust * (g + s.decay * s.w)
    return s.h


def lamb(s: Kept, g: Array) -> Any:
    mean, square = s.means(g)
    r = mean / (np.sqrt(square) + s.c.delta) + s.decay * s.w
    return s.rate * s.trust(np.linalg.norm(s.w), np.linalg.norm(r)) * r


FORMULAS: dict[str, Callable[[Kept, Array], Any]] = {
    "torch sgd": sgd,
    "torch nesterov": nesterov,
    "torch adam": adam,
    "torch adamw": adamw,
    "torch lars": lars,
    "torch lamb": lamb,
    "caffe sgd": caffe_sgd,
    "caffe nesterov": caffe_nesterov,
    "caffe adam": caffe_adam,
    "caffe adagrad": adagrad,
    "caffe rmsprop": rmsprop,
    "caffe adadelta": adadelta,
}
TAKE_THE_DECAY_THEMSELVES = adamw, lars, lamb
UPDATES = 12
SLOPES, START = np.linspace(-1.0, 3.0, 20), np.linspace(-1.5, 1.0, 20)
START[7] = 0.0
"""The loss is sum(slope · (w - 0.3)²) / 2, so that gradients move with the weights."""


def by_formula(name: str, c: SolverConfig) -> list[Array]:
    """The matrix, and the bias, which has a third of the decay and half of the rate."""
    formula = FORMULAS[name]
    tensors = [
        Kept(c, START.reshape(4, 5), c.weight_decay),
        Kept(c, START[:9].copy(), c.weight_decay / 3),
    ]
    for t in range(1, UPDATES + 1):
        for s, factor in zip(tensors, (1.0, 0.5), strict=True):
            s.t, s.rate = t, factor * learning_rate(c, t - 1, UPDATES)
            g = SLOPES[: s.w.size].reshape(s.w.shape) * (s.w - 0.3)
            if c.decay_form == "decoupled":
                s.w = s.w * (1 - s.rate * s.decay) - formula(s, g)
            elif formula in TAKE_THE_DECAY_THEMSELVES:
                s.w = s.w - formula(s, g)
            else:
                s.w = s.w - formula(
                    s, g + s.decay * (np.sign(s.w) if c.decay_form == "l1" else s.w)
                )
    return [s.w for s in tensors]


def trained(c: SolverConfig) -> list[Array]:
    weights = [nn.Parameter(torch.tensor(START).view(4, 5)), nn.Parameter(torch.tensor(START[:9]))]
    unused = nn.Parameter(torch.ones(3, dtype=torch.float64))
    named = dict(zip(("layer.weight", "layer.bias", "unused"), (*weights, unused), strict=True))
    optimizer = make_optimizer(named, c)
    for i in range(UPDATES):
        for each in weights:
            slopes = torch.from_numpy(SLOPES[: each.numel()]).view(each.shape)
            each.grad = slopes * (each.detach() - 0.3)
        set_rate(optimizer, learning_rate(c, i, UPDATES))
        optimizer.step()
    assert (unused == 1).all()
    return [each.detach().numpy() for each in weights]


def words(form: str, kind: str) -> SolverConfig:
    """A rate that falls, and for each word a value of its own: one in another's place is seen."""
    rates: dict[str, Any] = {"base_lr": 0.05, "lr_policy": "inv", "gamma": 0.3, "power": 0.75}
    means: dict[str, Any] = {"momentum": 0.8, "momentum2": 0.95, "rms_decay": 0.7, "trust": 0.02}
    mult: dict[str, Any] = {
        "lr_mult": {"*.bias": 0.5, "unused": 9.0},
        "decay_mult": {"*.bias": 1 / 3},
    }
    return SolverConfig(kind, weight_decay=0.1, momentum_form=form, **rates, **means, **mult)


DECAYS = {"l2": tuple(SOLVERS), "l1": MAY_L1, "decoupled": MAY_DECOUPLE}


def test_every_solver_has_a_formula() -> None:
    assert {name.split()[1] for name in FORMULAS} == set(SOLVERS)


@pytest.mark.parametrize(
    ("name", "decay"),
    [pair for pair in product(FORMULAS, DECAYS) if pair[0].split()[1] in DECAYS[pair[1]]],
)
@pytest.mark.parametrize("delta", [1e-8, 0.2])
def test_the_weights_of_12_updates(name: str, decay: Any, delta: float) -> None:
    config = replace(words(*name.split()), decay_form=decay, delta=delta)
    for ours, expected in zip(trained(config), by_formula(name, config), strict=True):
        assert ours == pytest.approx(expected, rel=1e-11)


def test_momentum_correction_makes_caffes_form_that_of_torch() -> None:
    """Goyal et al. 2017, equations 9 and 10: the rate outside is the rate inside, corrected."""
    caffes = words("caffe", "sgd")
    corrected, *_ = trained(replace(caffes, momentum_correction=True))
    torchs, *_ = trained(replace(caffes, momentum_form="torch"))
    assert corrected == pytest.approx(torchs, rel=1e-10)
    assert abs(trained(caffes)[0] - torchs).max() > 0.01


@pytest.mark.parametrize("kind", ["lars", "lamb"])
def test_weights_or_gradients_of_0_take_the_plain_rate(kind: str) -> None:
    for start, gradient, moved in ((0.0, 1.0, -0.1), (1.0, 0.0, 1.0)):
        weight = nn.Parameter(torch.full((2, 2), start, dtype=torch.float64))
        optimizer = make_optimizer({"w": weight}, SolverConfig(kind, base_lr=0.1))
        weight.grad = torch.full_like(weight, gradient)
        optimizer.step()
        assert weight.detach().numpy() == pytest.approx(np.full((2, 2), moved))
