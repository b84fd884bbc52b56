"""solver.type by reference: made, refused, and what a checkpoint holds of it."""

import json
from typing import Any

import pytest
import torch
from torch import nn, optim

from firecaffe.errors import OwnCodeError, RecipeError
from firecaffe.solvers.config import SolverConfig
from firecaffe.solvers.optimizer import check_solver, make_optimizer, set_rate
from firecaffe.solvers.optimizer_state import OptimizerNumbers, OptimizerTensors
from tests.kit.models_refused import refused
from tests.unit.solvers.own_optimizers import PLACE, Signs


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


def two_steps(config: SolverConfig) -> None:
    model, optimizer = made(config)
    step(model, optimizer, 0.1)
    step(model, optimizer, 0.1)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (SolverConfig(type="torch.optim:LBFGS"), ["torch.optim:LBFGS", "step(closure)"]),
        (SolverConfig(type=f"{PLACE}:none"), [f"{PLACE}:none", "'no optimizer'"]),
        (SolverConfig(type=f"{PLACE}:Signs", args={"gamma": 1}), ["solver.type", "gamma"]),
        (SolverConfig(type=f"{PLACE}:Signs", args={"lr": 1}), ["solver.args", "solver.base_lr"]),
        (SolverConfig(type=f"{PLACE}:Signs", weight_decay=0.1), ["solver.weight_decay", "0.1"]),
        (SolverConfig(type=f"{PLACE}:Sings"), ["solver.type", "Sings"]),
        (SolverConfig(type="sing"), ["solver.type", "sing", "adamw", "module:Class"]),
        (SolverConfig(type=f"{PLACE}:KeepsMore"), ["KeepsMore", "'earlier'"]),
        (SolverConfig(type=f"{PLACE}:Wraps"), ["Wraps", "slow_weights"]),
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
