"""Caffe's six solvers, its L1 penalty and its multipliers, against its formulas in numpy.

Source of each: the solver's ComputeUpdateValue in BVLC Caffe, src/caffe/solvers.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from firecaffe.solvers.config import MAY_L1, SolverConfig
from firecaffe.solvers.optimizer import make_optimizer, set_rate
from firecaffe.solvers.rate_policy import learning_rate

Array = npt.NDArray[np.float64]
UPDATES, COUNT = 12, 20
Update = Callable[[SolverConfig, float, Array, dict[str, Array], int], Array]
"""(solver, rate, gradient, what is kept, number of the update from 1) -> what the weights lose."""


def sgd(c: SolverConfig, rate: float, g: Array, kept: dict[str, Array], t: int) -> Array:
    kept["h"] = c.momentum * kept["h"] + rate * g
    return kept["h"]


def nesterov(c: SolverConfig, rate: float, g: Array, kept: dict[str, Array], t: int) -> Array:
    before = kept["h"]
    kept["h"] = c.momentum * before + rate * g
    return (1 + c.momentum) * kept["h"] - c.momentum * before


def adagrad(c: SolverConfig, rate: float, g: Array, kept: dict[str, Array], t: int) -> Array:
    kept["h"] = kept["h"] + g * g
    return rate * g / (np.sqrt(kept["h"]) + c.delta)


def rmsprop(c: SolverConfig, rate: float, g: Array, kept: dict[str, Array], t: int) -> Array:
    kept["h"] = c.rms_decay * kept["h"] + (1 - c.rms_decay) * g * g
    return rate * g / (np.sqrt(kept["h"]) + c.delta)


def adadelta(c: SolverConfig, rate: float, g: Array, kept: dict[str, Array], t: int) -> Array:
    kept["h"] = c.momentum * kept["h"] + (1 - c.momentum) * g * g
    d = g * np.sqrt((kept["d"] + c.delta) / (kept["h"] + c.delta))
    kept["d"] = c.momentum * kept["d"] + (1 - c.momentum) * d * d
    return rate * d


def adam(c: SolverConfig, rate: float, g: Array, kept: dict[str, Array], t: int) -> Array:
    kept["h"] = c.momentum * kept["h"] + (1 - c.momentum) * g
    kept["d"] = c.momentum2 * kept["d"] + (1 - c.momentum2) * g * g
    correction = np.sqrt(1 - c.momentum2**t) / (1 - c.momentum**t)
    moved: Array = rate * correction * kept["h"] / (np.sqrt(kept["d"]) + c.delta)
    return moved


UPDATES_OF: dict[str, Update] = {
    "sgd": sgd,
    "nesterov": nesterov,
    "adagrad": adagrad,
    "rmsprop": rmsprop,
    "adadelta": adadelta,
    "adam": adam,
}

SLOPES = np.linspace(-1.0, 3.0, COUNT)
START = np.linspace(-1.5, 1.0, COUNT)
"""The loss is sum(slope · (w - 0.3)²) / 2, so that gradients move with the weights."""


def by_formula(c: SolverConfig, rate_mult: float, decay_mult: float) -> Array:
    w = START.copy()
    kept = {"h": np.zeros(COUNT), "d": np.zeros(COUNT)}
    for i in range(UPDATES):
        g = SLOPES * (w - 0.3)
        if c.clip_gradients:
            g = g * min(1.0, c.clip_gradients / float(np.sqrt((g * g).sum())))
        decay = c.weight_decay * decay_mult
        g = g + decay * (np.sign(w) if c.decay_form == "l1" else w)
        rate = rate_mult * learning_rate(c, i, UPDATES)
        w = w - UPDATES_OF[c.type](c, rate, g, kept, i + 1)
    return w


def trained(c: SolverConfig) -> Array:
    weight = nn.Parameter(torch.from_numpy(START.copy()).view(4, 5))
    unused = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = make_optimizer({"layer.weight": weight, "unused.bias": unused}, c)
    for i in range(UPDATES):
        weight.grad = torch.from_numpy(SLOPES).view(4, 5) * (weight.detach() - 0.3)
        if c.clip_gradients:
            nn.utils.clip_grad_norm_([weight], c.clip_gradients)
        set_rate(optimizer, learning_rate(c, i, UPDATES))
        optimizer.step()
    assert (unused == 1).all()
    return weight.detach().flatten().numpy()


def words(kind: str, **others: Any) -> SolverConfig:
    """With a rate that falls, and each word of a value of its own."""
    return SolverConfig(
        kind,
        base_lr=0.05,
        lr_policy="inv",
        gamma=0.3,
        power=0.75,
        momentum=0.8,
        momentum2=0.95,
        rms_decay=0.7,
        momentum_form="caffe" if kind in ("sgd", "nesterov", "adam") else "torch",
        weight_decay=0.1,
        **others,
    )


def test_each_may_have_l1() -> None:
    assert set(UPDATES_OF) == set(MAY_L1)


@pytest.mark.parametrize("kind", UPDATES_OF)
@pytest.mark.parametrize("form", ["l2", "l1"])
@pytest.mark.parametrize("delta", [1e-8, 0.2])
def test_the_weights_of_12_updates(kind: str, form: Any, delta: float) -> None:
    config = words(kind, decay_form=form, delta=delta)
    assert trained(config) == pytest.approx(by_formula(config, 1.0, 1.0), rel=1e-12)
    pattern = {"layer.*": 0.5}
    half = replace(config, lr_mult=pattern, decay_mult={"*.weight": 3.0})
    assert trained(half) == pytest.approx(by_formula(config, 0.5, 3.0), rel=1e-12)


@pytest.mark.parametrize("form", ["l2", "l1"])
def test_the_decay_is_not_clipped(form: Any) -> None:
    config = words("sgd", decay_form=form, clip_gradients=0.01)
    # torch adds 1e-6 to the norm that it divides by.
    assert trained(config) == pytest.approx(by_formula(config, 1.0, 1.0), rel=1e-5)


def test_l1_leaves_what_is_0_and_what_has_no_decay() -> None:
    config = SolverConfig(weight_decay=0.5, decay_form="l1", base_lr=0.1, momentum=0.0)
    for mult, expected in ((1.0, [-0.95, 0.0, 0.95]), (0.0, [-1.0, 0.0, 1.0])):
        weight = nn.Parameter(torch.tensor([-1.0, 0.0, 1.0]))
        optimizer = make_optimizer({"w": weight}, replace(config, decay_mult={"w": mult}))
        weight.grad = torch.zeros(3)
        optimizer.step()
        assert weight.tolist() == pytest.approx(expected)
