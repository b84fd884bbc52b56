"""Groups with multipliers, numbers no solver can do with; and solver.type by reference."""

import json
import math
from typing import Any

import pytest
import torch
from torch import nn, optim

from firecaffe.errors import OwnCodeError, RecipeError
from firecaffe.planner.workload import vectors_of
from firecaffe.solvers.config import SolverConfig
from firecaffe.solvers.optimizer import (
    SOLVERS,
    check_solver,
    decay_notes,
    groups_of,
    make_optimizer,
    set_rate,
)
from firecaffe.solvers.optimizer_state import OptimizerNumbers, OptimizerTensors
from firecaffe.solvers.update_rules import Outer
from tests.kit.models_refused import refused
from tests.unit.solvers.own_optimizers import PLACE, Signs

# --- ours -----------------------------------------------------------------------------------------


def named_network() -> dict[str, nn.Parameter]:
    layers = {"conv": nn.Conv2d(1, 2, 3), "norm": nn.BatchNorm2d(2), "fc": nn.Linear(2, 2)}
    return dict(nn.ModuleDict(layers).named_parameters())


def factors(**words: Any) -> dict[str, tuple[float, float]]:
    named = named_network()
    names = {id(each): name for name, each in named.items()}
    return {
        names[id(each)]: (group["rate_factor"], group["weight_decay"])
        for group in groups_of(named, SolverConfig(weight_decay=0.5, **words))
        for each in group["params"]
    }


def test_the_last_pattern_that_matches_decides_a_multiplier() -> None:
    assert factors(lr_mult={"*.bias": 2.0}, decay_mult={"*.bias": 0.0}) == {
        name: (2.0, 0.0) if name.endswith("bias") else (1.0, 0.5) for name in named_network()
    }
    by_name = factors(decay_mult={"@vector": 0.0, "fc.*": 3.0})
    bare = [name for name, (_, decay) in by_name.items() if decay == 0.0]
    assert bare == ["conv.bias", "norm.weight", "norm.bias"]
    assert by_name["fc.bias"] == by_name["fc.weight"] == (1.0, 1.5)
    assert len(groups_of(named_network(), SolverConfig())) == 1  # where nothing is multiplied
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


# --- one's own ------------------------------------------------------------------------------------


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(2, 2)


def made(config: SolverConfig) -> tuple[nn.Module, optim.Optimizer]:
    check_solver(config)
    model = network()
    return model, make_optimizer(dict(model.named_parameters()), config)


def step(model: nn.Module, optimizer: optim.Optimizer, rate: float) -> None:
    for place, weight in enumerate(model.parameters()):
        weight.grad = torch.full_like(weight, place - 0.5)
    set_rate(optimizer, rate)
    optimizer.step()


def test_it_has_its_arguments_and_the_policy_its_rate() -> None:
    words: dict[str, Any] = {"lr_mult": {"bias": 2.0}, "args": {"beta": 0.0}}
    model, optimizer = made(SolverConfig(type=f"{PLACE}:Signs", base_lr=0.5, **words))
    assert type(optimizer) is Signs
    weight, bias = (each.detach().clone() for each in model.parameters())
    step(model, optimizer, rate=0.1)
    torch.testing.assert_close(model.weight, weight + 0.1 * 0.9)
    torch.testing.assert_close(model.bias, bias - 0.2 * 0.9)


def test_a_parameter_may_be_called_groups() -> None:
    """As the numbers of groups are in a checkpoint."""
    model = nn.Module()
    model.groups = nn.Parameter(torch.ones(2))
    optimizers = [
        make_optimizer(dict(model.named_parameters()), SolverConfig(type="lamb")) for _ in range(2)
    ]
    step(model, optimizers[0], 0.1)
    kept = OptimizerNumbers(model, optimizers[0]).state_dict()
    assert kept == {"groups/step": 1}
    OptimizerNumbers(model, optimizers[1]).load_state_dict(kept)
    assert optimizers[1].state[model.groups]["step"] == 1


def test_what_it_keeps_goes_on_from_a_checkpoint() -> None:
    config = SolverConfig(type=f"{PLACE}:Signs")
    model, optimizer = made(config)
    numbers = OptimizerNumbers(model, optimizer)
    step(model, optimizer, 0.1)
    step(model, optimizer, 0.1)
    parts = OptimizerTensors(model, optimizer).parts()
    tensors = {path: part.tensor.clone() for path, part in parts.items()}
    written = json.loads(json.dumps(numbers.state_dict()))

    again, resumed = made(config)
    again.load_state_dict(model.state_dict())
    read = OptimizerNumbers(again, resumed)
    OptimizerTensors(again, resumed).load(tensors)
    read.load_state_dict(written)
    assert read.state_dict() == numbers.state_dict()
    assert resumed.param_groups[0]["seen"] == (2, 0)
    step(model, optimizer, 0.1)
    step(again, resumed, 0.1)
    for mine, theirs in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_torchs_others_will_do_and_ours_keep_their_state_as_it_was() -> None:
    model, optimizer = made(SolverConfig(type="torch.optim:NAdam", weight_decay=0.1))
    numbers = OptimizerNumbers(model, optimizer)
    step(model, optimizer, 0.1)
    assert type(optimizer) is optim.NAdam
    assert optimizer.param_groups[0]["weight_decay"] == 0.1
    assert numbers.state_dict() == {}


@pytest.mark.parametrize(
    ("kind", "decay", "is_said"),
    [("AdamW", 0.0, True), ("AdamW", 0.1, False), ("NAdam", 0.0, False)],
)
def test_a_decay_that_the_recipe_replaces_is_said(kind: str, decay: float, is_said: bool) -> None:
    config = SolverConfig(type=f"torch.optim:{kind}", weight_decay=decay)
    notes = decay_notes(made(config)[1], config)
    assert [kind in note and "0.01" in note for note in notes] == [True] * is_said


def test_attributes_that_no_step_changes_are_kept() -> None:
    two_steps(SolverConfig(type=f"{PLACE}:Holds"))


def two_steps(config: SolverConfig) -> None:
    model, optimizer = made(config)
    step(model, optimizer, 0.1)
    step(model, optimizer, 0.1)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (SolverConfig(type="torch.optim:LBFGS"), ["torch.optim:LBFGS", "step(closure)"]),
        (SolverConfig(type="torch.optim:SparseAdam"), ["torch.optim:SparseAdam", "dense"]),
        (SolverConfig(type=f"{PLACE}:none"), [f"{PLACE}:none", "'no optimizer'"]),
        (SolverConfig(type=f"{PLACE}:Signs", args={"gamma": 1}), ["solver.type", "gamma"]),
        (SolverConfig(type=f"{PLACE}:Signs", args={"lr": 1}), ["solver.args", "solver.base_lr"]),
        (SolverConfig(type=f"{PLACE}:Signs", weight_decay=0.1), ["solver.weight_decay", "0.1"]),
        (SolverConfig(type=f"{PLACE}:Sings"), ["solver.type", "Sings"]),
        (SolverConfig(type="sing"), ["solver.type", "sing", "adamw", "module:Class"]),
        (SolverConfig(type=f"{PLACE}:KeepsMore"), ["KeepsMore", "'earlier'"]),
        (SolverConfig(type=f"{PLACE}:Wraps"), ["Wraps", "slow_weights"]),
        (SolverConfig(type=f"{PLACE}:Counts"), ["Counts", "self.steps"]),
        (SolverConfig(type=f"{PLACE}:Inner"), ["Inner", "self.inner"]),
    ],
)
def test_what_a_step_or_a_checkpoint_cannot_do_with_is_one_line(
    config: SolverConfig, words: list[str]
) -> None:
    with refused(RecipeError, words) as caught:
        two_steps(config)
    assert len(str(caught.value)) < 400


def test_what_it_raises_itself_is_its_owns_to_read() -> None:
    with pytest.raises(OwnCodeError, match="ZeroDivisionError") as caught:
        two_steps(SolverConfig(type=f"{PLACE}:fails"))
    assert "in fails" in caught.value.traceback


def test_a_forecast_asks_for_more_than_a_training() -> None:
    """A run begins without a forecast, if its code fails there."""
    with refused(OwnCodeError, ["OfVectors", "takes vectors"]):
        vectors_of(SolverConfig(type=f"{PLACE}:OfVectors"))
