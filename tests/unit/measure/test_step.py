"""Steps that are timed alone, of networks that do not train all of their parameters."""

import dataclasses

import pytest
import torch
from torch import nn

from firecaffe import Recipe, SolverConfig
from firecaffe.gradients.reducer import GradientReducer
from firecaffe.measure import step_times as measured_step
from firecaffe.models import build_model
from firecaffe.recipe.checked_recipe import check_recipe


def frozen_below(*arguments: object) -> nn.Module:
    """LeNet whose first layer is not trained, which would shift the numbers of all others."""
    network = build_model("lenet", 10, 1)
    first = next(network.children())
    first.requires_grad_(False)
    return network


def test_a_rate_at_which_training_would_diverge_is_no_matter() -> None:
    recipe = dataclasses.replace(Recipe(), solver=SolverConfig(base_lr=1000.0))
    timed = measured_step.time_steps(
        check_recipe(recipe), torch.device("cpu"), 2, 0.0, micro_batches=1
    )
    assert len(timed.compute_s) == measured_step.FEWEST_STEPS


def test_the_ready_order_is_of_the_parameters_that_are_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[GradientReducer] = []

    class Kept(GradientReducer):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)  # type: ignore[arg-type]
            made.append(self)

    monkeypatch.setattr(measured_step, "build_network", frozen_below)
    monkeypatch.setattr(measured_step, "GradientReducer", Kept)
    recipe = Recipe()
    timed = measured_step.time_steps(
        check_recipe(recipe), torch.device("cpu"), 2, 0.0, micro_batches=1
    )
    (reducer,) = made
    assert len(timed.compute_s) == measured_step.FEWEST_STEPS
    trained = [p for p in frozen_below().parameters() if p.requires_grad]
    assert [p.shape for p in reducer.parameters] == [p.shape for p in trained]
    assert all(p.grad is not None and p.grad.any() for p in reducer.parameters)
