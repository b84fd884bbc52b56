"""A larger batch, and the rates that rules give it."""

from dataclasses import replace
from math import sqrt
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firecaffe.data import SampleOrder
from firecaffe.errors import RecipeError
from firecaffe.recipe.config import TrainConfig
from firecaffe.recipe.sections import Recipe
from firecaffe.solvers.config import SolverConfig
from firecaffe.solvers.rate_policy import learning_rate
from firecaffe.tuning.candidates import Candidate, apply, rules, with_batch
from tests.kit.training import recipe_with

POLICIES: dict[str, dict[str, Any]] = {
    "fixed": {},
    "step": {"gamma": 0.5, "stepsize": 90},
    "multistep": {"gamma": 0.5, "stepvalue": [320, 640, 960]},
    "exp": {"gamma": 0.999},
    "inv": {"gamma": 0.001, "power": 0.75},
    "sigmoid": {"gamma": -0.01, "stepsize": 640},
    "poly": {"power": 0.5},
    "cosine": {},
}


@pytest.mark.parametrize("policy", POLICIES)
def test_the_rate_is_the_same_at_the_same_samples(policy: str) -> None:
    solver = SolverConfig(base_lr=0.1, lr_policy=policy, warmup_steps=160, **POLICIES[policy])
    small = Recipe(train=TrainConfig(64, 16, steps=1600, eval_every=160), solver=solver)
    large = with_batch(small, 512, 64 * 100)
    assert (large.train.steps, large.train.eval_every) == (208, 21)  # 16 epochs of 13 steps
    assert large.solver.warmup_steps == 21
    bare = replace(small.solver, warmup_steps=0)
    stretched = replace(large.solver, warmup_steps=0)
    for epoch in range(16):
        rates = (learning_rate(bare, 100 * epoch, 1600), learning_rate(stretched, 13 * epoch, 208))
        assert rates[1] == pytest.approx(rates[0], rel=0.02)


@settings(max_examples=100)
@given(st.integers(1, 3000), st.integers(1, 64), st.integers(64, 5000))
def test_the_samples_are_the_same(steps: int, factor: int, samples: int) -> None:
    small = Recipe(train=TrainConfig(16, 16, steps=steps))
    large = with_batch(small, 16 * factor, samples)
    seen = [
        SampleOrder(0, samples, each.train.global_batch_size, 16).samples_before(each.train.steps)
        for each in (small, large)
    ]
    assert abs(seen[1] - seen[0]) <= 16 * factor


def test_the_rate_is_that_of_its_own_batch() -> None:
    """What a scale made of it; the words that made it are gone."""
    solver = SolverConfig(base_lr=0.1, scale="sqrt", reference_batch_size=16)
    large = with_batch(Recipe(train=TrainConfig(64, 16), solver=solver), 256, 1000)
    assert large.solver.base_lr == pytest.approx(0.2)
    assert (large.solver.scale, large.solver.reference_batch_size) == ("none", 0)
    assert (large.train.epochs, large.train.steps, large.train.micro_batch_size) == (0, 0, 16)


def test_many_even_drops_do_not_move() -> None:
    """A stepsize of 100 would be 12.5 steps: the last of 15 drops would come six steps too late."""
    solver = SolverConfig(lr_policy="step", gamma=0.5, stepsize=100)
    large = with_batch(Recipe(train=TrainConfig(64, 16, steps=1600), solver=solver), 512, 64 * 800)
    assert large.train.steps == 200
    assert large.solver.stepvalue == [round(12.5 * number) for number in range(1, 16)]
    with pytest.raises(RecipeError, match=r"would come after 0, 1, 2, .* take a smaller batch"):
        with_batch(Recipe(train=TrainConfig(64, 16, steps=1600), solver=solver), 16384, 64 * 800)


def test_what_cannot_be_is_refused() -> None:
    drops = SolverConfig(lr_policy="multistep", gamma=0.1, stepvalue=[100, 104])
    recipe = Recipe(train=TrainConfig(64, 16, steps=200), solver=drops)
    with pytest.raises(RecipeError, match="drops after steps 100, 104 would come after 7, 7"):
        with_batch(recipe, 1024, 6400)
    with pytest.raises(RecipeError, match="expected a multiple of micro_batch_size, 16"):
        with_batch(recipe, 100, 6400)


def at_batch(batch: int, solver: str = "sgd", warmup_steps: int = 0) -> Recipe:
    """With the rate that it had at another batch."""
    return Recipe(
        train=TrainConfig(batch, 16),
        solver=SolverConfig(type=solver, base_lr=0.01, warmup_steps=warmup_steps),
    )


def test_firecaffes_sweep_and_the_square_root() -> None:
    """GoogLeNet from 32 to 1024: 0.32 by the linear rule, and the paper's other four below it."""
    candidates = rules(at_batch(1024), 32, ["sgd"])
    warm = {each.rule: each.base_lr for each in candidates if each.warmup_share}
    assert {each.warmup_share for each in candidates} == {0.15, 0.0}
    assert len(candidates) == 2 * len(warm)
    parts = {f"linear / {2**n}": 0.32 / 2**n for n in range(1, 5)}
    expected = {"linear": 0.32, "square root": 0.01 * sqrt(32), "linear x 2": 0.64, **parts}
    assert warm == pytest.approx(expected)


def test_like_rates_are_tried_once() -> None:
    assert len(rules(at_batch(64), 16, ["sgd"])) == 2 * 6  # the root of 4 is a half of it


def test_a_warm_up_of_its_own_stays() -> None:
    warm = at_batch(128, warmup_steps=7)
    candidates = rules(warm, 16, ["sgd"])
    assert apply(warm, candidates[0], 100).solver.warmup_steps == 7
    cyclic = at_batch(128).replace("solver.lr_policy", "one_cycle")
    for each in (*candidates, *rules(cyclic, 16, ["sgd"])):
        assert each.warmup_share == 0.0


def test_its_own_batch_is_swept_both_ways() -> None:
    found = rules(at_batch(64), 64, ["sgd"])
    assert {each.base_lr for each in found} == {0.0025, 0.005, 0.01, 0.02, 0.04}


def test_layer_wise_solvers_have_rates_of_their_own() -> None:
    candidates = rules(at_batch(2048), 32, ["lars", "lamb"])
    lars = {each.base_lr for each in candidates if each.solver == "lars"}
    assert lars == {16.0, 8.0, 4.0, 2.0, 1.0}
    lamb = {each.rule: each.base_lr for each in candidates if each.solver == "lamb"}
    assert lamb["lamb"] == pytest.approx(0.01)  # a quarter of 0.04, at a sixteenth of 32,768


@pytest.mark.parametrize(
    ("words", "solvers", "line"),
    [
        ("", ["adamax"], "they are sgd, nesterov"),
        ("", ["adam"], "no rule says a rate"),
        ("solver.base_lr=0.0", ["sgd"], r"solver\.base_lr is 0"),
        (
            "synchrony.mode=asynchronous synchrony.lock=none",
            ["sgd", "lars"],
            r"solver\.type = lars with synchrony\.lock = none",
        ),
    ],
)
def test_a_solver_without_a_rate_is_refused(words: str, solvers: list[str], line: str) -> None:
    with pytest.raises(RecipeError, match=line):
        rules(recipe_with(words, at_batch(64)), 16, solvers)


def test_a_candidate_is_put_into_the_recipe() -> None:
    recipe = at_batch(64)
    caffe = replace(recipe, solver=replace(recipe.solver, momentum_form="caffe"))
    found = apply(caffe, Candidate("sgd", 0.3, 0.05, "linear"), 390)
    assert (found.solver.base_lr, found.solver.warmup_steps) == (0.3, 20)
    assert found.solver.momentum_form == "caffe"
    lars = apply(caffe, Candidate("lars", 8.0, 0.0, "lars"), 390).solver
    assert (lars.type, lars.momentum_form, lars.warmup_steps) == ("lars", "torch", 0)
