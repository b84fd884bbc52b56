"""The rules' rates, from their formulas."""

from dataclasses import replace
from math import sqrt

import pytest

from firecaffe.errors import RecipeError
from firecaffe.recipe.config import TrainConfig
from firecaffe.recipe.sections import Recipe
from firecaffe.solvers.config import SolverConfig
from firecaffe.synchrony.config import SynchronyConfig
from firecaffe.tuning.candidates import Candidate, apply, rules


def at_batch(batch: int, solver: str = "sgd", warmup_steps: int = 0) -> Recipe:
    """With the rate that it had at another batch."""
    return Recipe(
        train=TrainConfig(batch, 16),
        solver=SolverConfig(type=solver, base_lr=0.01, warmup_steps=warmup_steps),
    )


def test_firecaffes_sweep_and_the_square_root() -> None:
    """GoogLeNet from 32 to 1024: 0.32 by the linear rule, and the paper's other four below it."""
    found = rules(at_batch(1024), 32, ["sgd"])
    warm = [each for each in found if each.warmup_share]
    assert {each.warmup_share for each in found} == {0.15, 0.0}
    assert len(found) == 2 * len(warm)
    assert {each.rule: each.base_lr for each in warm} == pytest.approx(
        {
            "linear": 0.32,
            "square root": 0.01 * sqrt(32),
            "linear x 2": 0.64,
            "linear / 2": 0.16,
            "linear / 4": 0.08,
            "linear / 8": 0.04,
            "linear / 16": 0.02,
        }
    )


def test_like_rates_are_tried_once() -> None:
    assert len(rules(at_batch(64), 16, ["sgd"])) == 2 * 6  # the root of 4 is a half of it


def test_a_warm_up_of_its_own_stays() -> None:
    found = rules(at_batch(128, warmup_steps=7), 16, ["sgd"])
    assert {each.warmup_share for each in found} == {0.0}
    assert apply(at_batch(128, warmup_steps=7), found[0], 100).solver.warmup_steps == 7


def test_a_solver_that_cannot_stand_beside_other_words_is_not_tried() -> None:
    lockless = SynchronyConfig("asynchronous", lock="none")
    with pytest.raises(RecipeError, match=r"solver\.type = lars with synchrony\.lock = none"):
        rules(replace(at_batch(128), synchrony=lockless), 16, ["sgd", "lars"])


def test_one_cycle_gets_no_warm_up_beside_its_own() -> None:
    recipe = at_batch(128)
    recipe = replace(recipe, solver=replace(recipe.solver, lr_policy="one_cycle"))
    assert {each.warmup_share for each in rules(recipe, 16, ["sgd"])} == {0.0}


def test_its_own_batch_is_swept_both_ways() -> None:
    found = rules(at_batch(64), 64, ["sgd"])
    assert {each.base_lr for each in found} == {0.0025, 0.005, 0.01, 0.02, 0.04}


def test_layer_wise_solvers_have_rates_of_their_own() -> None:
    found = rules(at_batch(2048), 32, ["lars", "lamb"])
    by_solver = {solver: {e.base_lr for e in found if e.solver == solver} for solver in ("lars",)}
    assert by_solver["lars"] == {16.0, 8.0, 4.0, 2.0, 1.0}
    lamb = {each.rule: each.base_lr for each in found if each.solver == "lamb"}
    assert lamb["lamb"] == pytest.approx(0.01)  # a quarter of 0.04, at a sixteenth of 32,768


@pytest.mark.parametrize(
    ("solver", "message"), [("adamax", "they are sgd, nesterov"), ("adam", "no rule says a rate")]
)
def test_a_solver_without_a_rule_is_refused(solver: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        rules(at_batch(64), 16, [solver])


def test_no_rule_starts_from_a_rate_of_zero() -> None:
    with pytest.raises(RecipeError, match=r"solver\.base_lr is 0"):
        rules(replace(at_batch(64), solver=SolverConfig(base_lr=0.0)), 16, ["sgd"])


def test_a_candidate_is_put_into_the_recipe() -> None:
    recipe = at_batch(64)
    caffe = replace(recipe, solver=replace(recipe.solver, momentum_form="caffe"))
    found = apply(caffe, Candidate("sgd", 0.3, 0.05, "linear"), 390)
    assert (found.solver.base_lr, found.solver.warmup_steps) == (0.3, 20)
    assert found.solver.momentum_form == "caffe"
    lars = apply(caffe, Candidate("lars", 8.0, 0.0, "lars"), 390).solver
    assert (lars.type, lars.momentum_form, lars.warmup_steps) == ("lars", "torch", 0)
