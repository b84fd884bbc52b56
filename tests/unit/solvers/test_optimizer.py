"""Each solver's first updates of one number, against its paper's formula in plain Python.

g is the gradient with the L2 penalty, g + weight_decay w, as in Caffe. Those whose formula is
Caffe's too are held in `test_of_caffe`."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from firecaffe.errors import RecipeError
from firecaffe.solvers.config import MAY_DECOUPLE, SolverConfig
from firecaffe.solvers.optimizer import SOLVERS, check_solver, make_optimizer, set_rate
from firecaffe.solvers.outer_optimizer import Outer
from tests.unit.solvers.test_of_caffe import UPDATES_OF

START, GRADIENTS, RATE, DECAY = 2.0, (0.5, -3.0, 0.25), 0.1, 0.01


def sgd(w: float, c: SolverConfig) -> float:
    """v = momentum v + g; w -= lr v."""
    v = 0.0
    for gradient in GRADIENTS:
        v = c.momentum * v + gradient + c.weight_decay * w
        w -= c.base_lr * v
    return w


def nesterov(w: float, c: SolverConfig) -> float:
    """The step is taken from where momentum alone would lead: w -= lr (g + momentum v)."""
    v = 0.0
    for gradient in GRADIENTS:
        g = gradient + c.weight_decay * w
        v = c.momentum * v + g
        w -= c.base_lr * (g + c.momentum * v)
    return w


def adam(w: float, c: SolverConfig) -> float:
    """Kingma and Ba 2015, algorithm 1."""
    m = v = 0.0
    for t, gradient in enumerate(GRADIENTS, 1):
        g = gradient + c.weight_decay * w
        m = c.momentum * m + (1 - c.momentum) * g
        v = c.momentum2 * v + (1 - c.momentum2) * g * g
        m_hat, v_hat = m / (1 - c.momentum**t), v / (1 - c.momentum2**t)
        w -= c.base_lr * m_hat / (math.sqrt(v_hat) + c.delta)
    return w


def lars(w: float, c: SolverConfig) -> float:
    """Of one dimension: plain, the rate inside the momentum."""
    v = 0.0
    for g in GRADIENTS:
        v = c.momentum * v + c.base_lr * (g + c.weight_decay * w)
        w -= v
    return w


def lamb(w: float, c: SolverConfig) -> float:
    """Of one dimension: Adam's update with decoupled decay."""
    m = v = 0.0
    for t, g in enumerate(GRADIENTS, 1):
        m = c.momentum * m + (1 - c.momentum) * g
        v = c.momentum2 * v + (1 - c.momentum2) * g * g
        r = (m / (1 - c.momentum**t)) / (math.sqrt(v / (1 - c.momentum2**t)) + c.delta)
        w -= c.base_lr * (r + c.weight_decay * w)
    return w


def adamw(w: float, c: SolverConfig) -> float:
    """Loshchilov and Hutter 2019, algorithm 2."""
    m = v = 0.0
    for t, g in enumerate(GRADIENTS, 1):
        m = c.momentum * m + (1 - c.momentum) * g
        v = c.momentum2 * v + (1 - c.momentum2) * g * g
        m_hat, v_hat = m / (1 - c.momentum**t), v / (1 - c.momentum2**t)
        w -= c.base_lr * (m_hat / (math.sqrt(v_hat) + c.delta) + c.weight_decay * w)
    return w


FORMULAS: dict[str, Callable[[float, SolverConfig], float]] = {
    "sgd": sgd,
    "nesterov": nesterov,
    "adam": adam,
    "adamw": adamw,
    "lars": lars,
    "lamb": lamb,
}


def updated(config: SolverConfig, count: int = len(GRADIENTS)) -> float:
    parameter = nn.Parameter(torch.tensor([START], dtype=torch.float64))
    optimizer = make_optimizer({"weight": parameter}, config)
    for gradient in GRADIENTS[:count]:
        parameter.grad = torch.tensor([gradient], dtype=torch.float64)
        optimizer.step()
    return parameter.item()


def test_every_solver_has_a_formula() -> None:
    assert FORMULAS.keys() | UPDATES_OF.keys() == SOLVERS.keys()


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("decay", [0.0, DECAY])
@pytest.mark.parametrize("delta", [1e-8, 0.3])
def test_updates(name: str, decay: float, delta: float) -> None:
    # Every word has a value of its own, so that one in another's place is seen.
    config = SolverConfig(
        type=name,
        base_lr=RATE,
        momentum=0.8,
        momentum2=0.95,
        rms_decay=0.7,
        delta=delta,
        weight_decay=decay,
    )
    assert updated(config) == pytest.approx(FORMULAS[name](START, config), rel=1e-12)


@pytest.mark.parametrize("name", MAY_DECOUPLE)
def test_decoupled_decay_shrinks_the_weight_beside_the_update(name: str) -> None:
    """Loshchilov and Hutter 2019, algorithm 1: an update whose gradient knows no decay, of a
    weight that has shrunk by the rate times the decay. All three gradients are of no weight, so
    the updates are those of a training without decay.
    """
    plain = SolverConfig(type=name, base_lr=RATE, momentum=0.8, rms_decay=0.7)
    expected, before = START, START
    for count in range(1, len(GRADIENTS) + 1):
        after = updated(plain, count)
        expected = expected * (1 - RATE * DECAY) + after - before
        before = after
    config = replace(plain, weight_decay=DECAY, decay_form="decoupled")
    assert updated(config) == pytest.approx(expected, rel=1e-12)
    bare = replace(config, decay_mult={"weight": 0.0})
    assert updated(bare) == updated(plain)


def test_a_decoupled_decay_falls_with_the_rate() -> None:
    config = SolverConfig(base_lr=1.0, weight_decay=0.5, decay_form="decoupled", momentum=0.0)
    parameter = nn.Parameter(torch.tensor([START]))
    unused = nn.Parameter(torch.tensor([START]))
    optimizer = make_optimizer({"weight": parameter, "unused": unused}, config)
    parameter.grad = torch.zeros(1)
    set_rate(optimizer, 0.1)
    optimizer.step()
    assert parameter.item() == pytest.approx(START * 0.95)
    assert unused.item() == START


def test_a_policy_moves_the_momentum() -> None:
    for kind, found in (("sgd", ("momentum",)), ("adamw", ("betas", 0)), ("lars", ("momentum",))):
        optimizer = make_optimizer({"w": nn.Parameter(torch.zeros(1))}, SolverConfig(type=kind))
        set_rate(optimizer, 0.1, 0.7)
        value: Any = optimizer.param_groups[0]
        for key in found:
            value = value[key]
        assert value == 0.7


@pytest.mark.parametrize("name", SOLVERS)
def test_the_foreach_form_is_fixed(name: str) -> None:
    optimizer = make_optimizer({"w": nn.Parameter(torch.zeros(1))}, SolverConfig(type=name))
    assert all(group.get("foreach", True) is True for group in optimizer.param_groups)


@pytest.mark.parametrize("name", SOLVERS)
def test_accepted(name: str) -> None:
    check_solver(SolverConfig(type=name, momentum=0.5))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"type": "adamax"}, r"solver\.type is 'adamax'; it must be one of sgd, nesterov"),
        ({"base_momentum": 1.0}, r"solver\.base_momentum is 1"),
        ({"base_lr": -0.1}, r"solver\.base_lr is -0\.1; it must be 0 or more"),
        ({"base_lr": math.inf}, r"solver\.base_lr is inf"),
        ({"base_lr": math.nan}, r"solver\.base_lr is nan"),
        ({"weight_decay": -1e-4}, r"solver\.weight_decay is -0\.0001"),
        ({"weight_decay": math.nan}, r"solver\.weight_decay is nan"),
        ({"clip_gradients": -1.0}, r"solver\.clip_gradients is -1"),
        ({"delta": -1e-8}, r"solver\.delta is -1e-08"),
        ({"warmup_steps": -1}, r"solver\.warmup_steps is -1"),
        ({"momentum": 1.0}, r"solver\.momentum is 1\.0; it must be from 0 up to"),
        ({"momentum": -0.1}, r"solver\.momentum is -0\.1"),
        ({"momentum": math.nan}, r"solver\.momentum is nan"),
        ({"momentum2": 1.0}, r"solver\.momentum2 is 1\.0"),
        ({"rms_decay": 1.5}, r"solver\.rms_decay is 1\.5"),
    ],
)
def test_refused(words: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        check_solver(SolverConfig(**words))


def test_slowmo_at_a_rate_of_zero_is_an_average() -> None:
    """Its momentum is in units of the rate, and has no value there."""
    weights = [nn.Parameter(torch.tensor([3.0, 5.0])), nn.Parameter(torch.tensor([7.0]))]
    outer = Outer(weights, "slowmo")
    weights[0].grad = torch.tensor([1.0, 2.0])  # the other one was not used
    outer.step(0.0)
    assert [each.tolist() for each in weights] == [[2.0, 3.0], [7.0]]
    assert not outer.optimizer.state
