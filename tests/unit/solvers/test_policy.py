"""Policies against Caffe's formulas, worked out by hand.

Source: the comment of `lr_policy` in SolverParameter, BVLC Caffe's caffe.proto:
fixed: base_lr; step: base_lr gamma^(floor(iter / stepsize)); exp: base_lr gamma^iter;
inv: base_lr (1 + gamma iter)^(-power); multistep: as step, at each stepvalue;
poly: base_lr (1 - iter / max_iter)^power; sigmoid: base_lr / (1 + exp(-gamma (iter - stepsize))).
"""

import math
from typing import Any

import pytest
import torch
from torch import nn, optim

from firecaffe.errors import RecipeError
from firecaffe.solvers.config import SolverConfig
from firecaffe.solvers.rate_policy import (
    LENGTH_DEPENDENT,
    POLICIES,
    batch_scale,
    check_policy,
    learning_rate,
    momentum,
    rate_notes,
)

MAX_ITER = 100

# By update, counted from 0; the last one of 100 is 99.
TABLE: list[tuple[dict[str, Any], dict[int, float]]] = [
    ({"lr_policy": "fixed"}, {0: 0.5, 1: 0.5, 99: 0.5}),
    (
        {"lr_policy": "step", "gamma": 0.1, "stepsize": 40},
        {0: 0.5, 1: 0.5, 39: 0.5, 40: 0.05, 79: 0.05, 80: 0.005, 99: 0.005},
    ),
    ({"lr_policy": "step", "gamma": 2.0, "stepsize": 1}, {0: 0.5, 1: 1.0, 2: 2.0, 10: 512.0}),
    (
        {"lr_policy": "exp", "gamma": 0.5},
        {0: 0.5, 1: 0.25, 2: 0.125, 10: 0.00048828125, 99: 0.5**100},
    ),
    ({"lr_policy": "inv", "gamma": 1.0, "power": 2.0}, {0: 0.5, 1: 0.125, 3: 0.03125, 99: 0.00005}),
    # LeNet's solver in Caffe: gamma 0.0001, power 0.75; 1.0099^-0.75 = e^-0.007388487
    ({"lr_policy": "inv", "gamma": 0.0001, "power": 0.75}, {0: 0.5, 99: 0.5 * 0.9926387407}),
    (
        {"lr_policy": "multistep", "gamma": 0.1, "stepvalue": [10, 50, 99]},
        {0: 0.5, 1: 0.5, 9: 0.5, 10: 0.05, 49: 0.05, 50: 0.005, 98: 0.005, 99: 0.0005},
    ),
    ({"lr_policy": "poly", "power": 1.0}, {0: 0.5, 1: 0.495, 50: 0.25, 99: 0.005}),
    # GoogLeNet's: the square root. 1 - 0.19 = 0.9 squared.
    ({"lr_policy": "poly", "power": 0.5}, {0: 0.5, 19: 0.45, 64: 0.3, 99: 0.05}),
    # e^1.5 = 4.4816890703, so 1 / (1 + e^1.5) = 0.1824255238.
    (
        {"lr_policy": "sigmoid", "gamma": -0.5, "stepsize": 3},
        {0: 0.5 * 0.8175744762, 3: 0.25, 6: 0.5 * 0.1824255238},
    ),
    ({"lr_policy": "sigmoid", "gamma": 0.5, "stepsize": 3}, {0: 0.5 * 0.1824255238, 3: 0.25}),
    # A tenth to the peak at update 9, and down to a thousandth of the first.
    (
        {"lr_policy": "one_cycle", "pct_start": 0.1, "div_factor": 10.0, "final_div_factor": 1e3},
        {0: 0.05, 9: 0.5, 54: 0.250025, 99: 0.00005},
    ),
    ({"lr_policy": "cosine"}, {0: 0.5, 25: 0.25 * 1.7071067812, 50: 0.25, 75: 0.25 * 0.2928932188}),
]


def test_every_policy_is_in_the_table() -> None:
    assert {words["lr_policy"] for words, _ in TABLE} == set(POLICIES)


@pytest.mark.parametrize(("words", "expected"), TABLE)
def test_rates(words: dict[str, Any], expected: dict[int, float]) -> None:
    solver = SolverConfig(base_lr=0.5, **words)
    check_policy(solver)
    for i, rate in expected.items():
        assert learning_rate(solver, i, MAX_ITER) == pytest.approx(rate, rel=1e-9)
    last = max(expected)
    same = learning_rate(solver, last, MAX_ITER) == learning_rate(solver, last, 2 * MAX_ITER)
    assert same == (words["lr_policy"] not in LENGTH_DEPENDENT)


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize(("steps", "pct_start"), [(100, 0.3), (7, 0.5), (10, 1.0), (30, 0.01)])
def test_one_cycle_is_torch_s(steps: int, pct_start: float) -> None:
    """Against torch.optim.lr_scheduler.OneCycleLR, rate and momentum."""
    words: dict[str, Any] = {"pct_start": pct_start, "div_factor": 8.0, "final_div_factor": 50.0}
    solver = SolverConfig(
        base_lr=0.5, lr_policy="one_cycle", momentum=0.95, base_momentum=0.8, **words
    )
    check_policy(solver)
    optimizer = optim.SGD([nn.Parameter(torch.zeros(1))], 0.1, momentum=0.9)
    scheduler = optim.lr_scheduler.OneCycleLR(
        optimizer, 0.5, steps, base_momentum=0.8, max_momentum=0.95, **words
    )
    for i in range(steps):
        (group,) = optimizer.param_groups
        assert learning_rate(solver, i, steps) == pytest.approx(group["lr"], rel=1e-9)
        assert momentum(solver, i, steps) == pytest.approx(group["momentum"], rel=1e-9)
        if i + 1 < steps:
            scheduler.step()


def test_one_cycle_without_a_momentum_and_whose_peak_is_the_first_update() -> None:
    assert momentum(SolverConfig(lr_policy="one_cycle"), 3, 10) is None
    assert momentum(SolverConfig(base_momentum=0.8), 3, 10) is None
    # torch's divides by zero there.
    solver = SolverConfig(base_lr=0.5, lr_policy="one_cycle", pct_start=0.1)
    assert learning_rate(solver, 0, 10) == 0.5
    assert learning_rate(solver, 0, 1) > 0


def test_warm_up_is_a_factor_on_the_policy() -> None:
    solver = SolverConfig(base_lr=1.0, lr_policy="poly", warmup_steps=2)
    rates = [learning_rate(solver, i, 4) for i in range(4)]
    assert rates == pytest.approx([0.5, 0.75, 0.5, 0.25])


@pytest.mark.parametrize(
    ("scale", "batch", "factor"),
    [("none", 4096, 1.0), ("linear", 4096, 32.0), ("sqrt", 2048, 4.0), ("linear", 64, 0.5)],
)
def test_the_scale_of_a_batch(scale: str, batch: int, factor: float) -> None:
    solver = SolverConfig(base_lr=0.1, scale=scale, reference_batch_size=128)
    assert batch_scale(solver, batch) == factor
    rate = learning_rate(solver, 3, 10, batch_scale(solver, batch))
    assert rate == pytest.approx(0.1 * factor)


def test_goyals_warm_up() -> None:
    """From the rate of batch 256 to that of 8192, a thirty-second each step of thirty-one."""
    solver = SolverConfig(base_lr=0.1, scale="linear", reference_batch_size=256, warmup_steps=31)
    rates = [learning_rate(solver, i, 100, batch_scale(solver, 8192)) for i in range(33)]
    assert rates[:2] == pytest.approx([0.2, 0.3])
    assert rates[30:] == pytest.approx([3.2, 3.2, 3.2])


def test_a_scale_and_a_warm_up_that_is_too_long_are_said() -> None:
    solver = SolverConfig(base_lr=0.01, scale="linear", reference_batch_size=128)
    (said,) = rate_notes(solver, 1024, 10)
    assert "0.08 = 0.01 x 8" in said
    (said,) = rate_notes(SolverConfig(warmup_steps=100), 64, 24)
    assert "100 steps" in said
    assert rate_notes(SolverConfig(), 1024, 10) == []
    assert rate_notes(SolverConfig(warmup_steps=100), 64, 100) == []


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ({"lr_policy": "cyclic"}, "lr_policy"),
        ({"lr_policy": "step", "stepsize": 5}, "gamma"),
        ({"lr_policy": "exp"}, "gamma"),
        ({"lr_policy": "inv"}, "gamma"),
        ({"lr_policy": "multistep", "stepvalue": [5]}, "gamma"),
        ({"lr_policy": "sigmoid"}, "gamma"),
        ({"gamma": math.nan}, "gamma"),
        ({"power": math.inf}, "power"),
        ({"lr_policy": "step", "gamma": 0.1}, "stepsize"),
        ({"lr_policy": "multistep", "gamma": 0.1}, "stepvalue"),
        ({"lr_policy": "multistep", "gamma": 0.1, "stepvalue": [5, 3]}, "stepvalue"),
        ({"lr_policy": "multistep", "gamma": 0.1, "stepvalue": [5, 5]}, "stepvalue"),
        ({"lr_policy": "multistep", "gamma": 0.1, "stepvalue": [-1, 5]}, "stepvalue"),
        ({"lr_policy": "one_cycle", "pct_start": 1.5}, "pct_start"),
        ({"lr_policy": "one_cycle", "div_factor": 0.5}, "div_factor"),
        ({"lr_policy": "one_cycle", "final_div_factor": 0.0}, "final_div_factor"),
        ({"scale": "cubic"}, "scale"),
    ],
)
def test_refused(words: dict[str, Any], name: str) -> None:
    with pytest.raises(RecipeError, match=rf"^solver\.{name} is "):
        check_policy(SolverConfig(**words))
