"""Groups with multipliers, what a policy sets, and numbers that no solver can do with."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from firecaffe.errors import RecipeError
from firecaffe.solvers.config import SolverConfig
from firecaffe.solvers.optimizer import (
    SOLVERS,
    check_solver,
    groups_of,
    make_optimizer,
    set_rate,
)
from firecaffe.solvers.outer_optimizer import Outer


def network() -> dict[str, nn.Parameter]:
    layers = {"conv": nn.Conv2d(1, 2, 3), "norm": nn.BatchNorm2d(2), "fc": nn.Linear(2, 2)}
    return dict(nn.ModuleDict(layers).named_parameters())


def factors(**words: Any) -> dict[str, tuple[float, float]]:
    named = network()
    names = {id(each): name for name, each in named.items()}
    return {
        names[id(each)]: (group["rate_factor"], group["weight_decay"])
        for group in groups_of(named, SolverConfig(weight_decay=0.5, **words))
        for each in group["params"]
    }


def test_the_last_pattern_that_matches_decides_a_multiplier() -> None:
    assert factors(lr_mult={"*.bias": 2.0}, decay_mult={"*.bias": 0.0}) == {
        name: (2.0, 0.0) if name.endswith("bias") else (1.0, 0.5) for name in network()
    }
    by_name = factors(decay_mult={"@vector": 0.0, "fc.*": 3.0})
    bare = [name for name, (_, decay) in by_name.items() if decay == 0.0]
    assert bare == ["conv.bias", "norm.weight", "norm.bias"]
    assert by_name["fc.bias"] == by_name["fc.weight"] == (1.0, 1.5)
    assert len(groups_of(network(), SolverConfig())) == 1  # where nothing is multiplied
    with pytest.raises(RecipeError, match=r"solver.lr_mult has 'conv1.\*', which no parameter"):
        factors(lr_mult={"conv1.*": 2.0})


def test_a_policy_moves_the_momentum() -> None:
    for kind, path in (("sgd", ("momentum",)), ("adamw", ("betas", 0)), ("lars", ("momentum",))):
        optimizer = make_optimizer({"w": nn.Parameter(torch.zeros(1))}, SolverConfig(type=kind))
        set_rate(optimizer, 0.1, 0.7)
        value: Any = optimizer.param_groups[0]
        for key in path:
            value = value[key]
        assert value == 0.7


def test_every_solver_is_accepted_and_its_foreach_form_is_fixed() -> None:
    for name in SOLVERS:
        config = SolverConfig(type=name, momentum=0.5)
        check_solver(config)
        optimizer = make_optimizer({"w": nn.Parameter(torch.zeros(1))}, config)
        assert all(group.get("foreach", True) is True for group in optimizer.param_groups)


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("type", ["adamax"]),
        ("momentum_form", ["torchs"]),
        ("lr_mult", [{"*": -1.0}]),
        ("decay_mult", [{"*": math.inf}, {"*": math.nan}]),
        ("base_lr", [-0.1, math.inf, math.nan]),
        ("weight_decay", [-1e-4, math.nan]),
        ("clip_gradients", [-1.0]),
        ("delta", [-1e-8]),
        ("warmup_steps", [-1]),
        ("trust", [-1.0]),
        ("momentum", [1.0, -0.1, math.nan]),
        ("base_momentum", [1.0]),
        ("momentum2", [1.0]),
        ("rms_decay", [1.5]),
    ],
)
def test_refused(word: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(RecipeError, match=rf"^solver\.{word} "):
            check_solver(SolverConfig(**{word: value}))


def test_slowmo_at_a_rate_of_zero_is_an_average() -> None:
    """Its momentum is in units of the rate, and has no value there."""
    weights = [nn.Parameter(torch.tensor([3.0, 5.0])), nn.Parameter(torch.tensor([7.0]))]
    outer = Outer(weights, "slowmo")
    weights[0].grad = torch.tensor([1.0, 2.0])  # the other one was not used
    outer.step(0.0)
    assert [each.tolist() for each in weights] == [[2.0, 3.0], [7.0]]
    assert not outer.optimizer.state
