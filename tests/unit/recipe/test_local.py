"""What mode local asks: numbers that fit, and workers that can share out replicas."""

import re
from dataclasses import replace
from typing import Any

import pytest

from firecaffe import Recipe, SolverConfig, SynchronyConfig, TrainConfig
from firecaffe.data import SampleOrder
from firecaffe.errors import RecipeError
from firecaffe.recipe.checked_recipe import check_recipe
from firecaffe.recipe.run import Ranks, Run
from firecaffe.recipe.worker_numbers import check_ranks
from firecaffe.synchrony.rounds import Rounds
from tests.unit.recipe.test_sections import changed

LOCAL = Recipe(
    train=TrainConfig(global_batch_size=96, micro_batch_size=8, steps=100),
    synchrony=SynchronyConfig("local", replicas=4, local_steps=8),
)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ({"synchrony.replicas": 5}, "replicas is 5 of 12 micro-batches a step"),
        ({"synchrony.replicas": 0}, "synchrony.replicas is 0; it must be 1 to 4096"),
        ({"synchrony.local_steps": 101}, "but the training has 100 steps; it must be at most 100"),
        (
            {"synchrony.warm_steps": 93},
            "local_steps is 8 after 93 synchronous steps, but the training has 100 steps; it must "
            "be at most 7",
        ),
        ({"synchrony.overlap_steps": 8}, "overlap_steps is 8 with synchrony.local_steps 8; it"),
        ({"synchrony.fragments": 9}, "fragments is 9 with synchrony.local_steps 8; it must be at"),
        (
            {"synchrony.overlap_steps": 2, "synchrony.fragments": 3},
            "overlap_steps is 2 with synchrony.local_steps 8 in 3 fragments; it must be less than "
            "2",
        ),
        ({"synchrony.outer_lr": 0.0}, "outer_lr is 0; it must be above 0, or -1"),
        ({"synchrony.outer_lr": float("nan")}, "synchrony.outer_lr is nan"),
        ({"synchrony.outer_momentum": -0.5}, "outer_momentum is -0.5; it must be from 0"),
        ({"synchrony.outer_momentum": 1.0}, "outer_momentum is 1; it must be from 0"),
        (
            {"exchange.compressor": "int8", "exchange.compressor_level": 3},
            "the tree over 4 replicas ends at level 2",
        ),
    ],
)
def test_refused(words: dict[str, Any], line: str) -> None:
    recipe = LOCAL
    check_recipe(recipe)
    for word, value in words.items():
        recipe = changed(recipe, word, value)
    with pytest.raises(RecipeError, match=re.escape(line)):
        check_recipe(recipe)


def test_workers_share_out_replicas() -> None:
    def check(workers: int, level: int = 0) -> None:
        recipe = changed(LOCAL, "synchrony.replicas", 6)
        if level:
            recipe = changed(recipe, "exchange.compressor", "int8")
            recipe = changed(recipe, "exchange.compressor_level", level)
        check_ranks(recipe, workers, workers, on_gpus=False)

    for workers in range(1, 7):
        check(workers)
    with pytest.raises(RecipeError, match=r"replicas is 6 on 7 workers.*may be 1 to 6 workers"):
        check(7)
    check(3, level=1)
    with pytest.raises(RecipeError, match="6 ranks but only 3 sums of 2 replicas to encode"):
        check(6, level=1)


def rounds(words: dict[str, Any], solver: SolverConfig | None = None) -> Rounds:
    recipe = replace(LOCAL, solver=solver or SolverConfig())
    for word, value in words.items():
        recipe = changed(recipe, f"synchrony.{word}", value)
    checked = check_recipe(recipe)
    order = SampleOrder(0, 960, 96, 8)  # ten steps an epoch
    return Run(checked, Ranks(), order, {}, "tree").rounds


def test_when_replicas_part() -> None:
    drops = SolverConfig(lr_policy="multistep", gamma=0.1, stepvalue=[40, 60], warmup_steps=5)
    assert rounds({}).synchronous == 0
    assert rounds({"warm_steps": 7}).synchronous == 7
    assert rounds({"warm_epochs": 2}).synchronous == 20
    assert rounds({"warm_until_drop": True}, drops).synchronous == 40
    assert [each.first for each in rounds({"warm_steps": 7}).taken(15)] == [7]
    late = replace(drops, stepvalue=[100])
    with pytest.raises(RecipeError, match="the rate does not drop in the training's 100 steps"):
        rounds({"warm_until_drop": True}, late)
    with pytest.raises(RecipeError, match=r"after 100 synchronous steps.*; fewer steps may be"):
        rounds({"warm_epochs": 10})


def test_the_quadratic_rule_follows_the_policy() -> None:
    drops = SolverConfig(base_lr=0.2, lr_policy="multistep", gamma=0.5, stepvalue=[24])
    found = rounds({"growth_coefficient": 1.23}, drops)
    assert found.taken(37)  # (1.23 / 0.2)^2 = 37.8
    assert [each.steps for each in found.taken(100)] == [63]  # (1.23 / 0.1)^2 = 151
