"""The recipes of a scheme's rounds."""

import tomllib
from pathlib import Path

import pytest

from firecaffe.compression.config import PruneConfig
from firecaffe.errors import RecipeError
from firecaffe.models.config import ModelConfig
from firecaffe.recipe.config import TrainConfig
from firecaffe.recipe.sections import Recipe
from firecaffe.shrink.layer_sizes import LayerChoice
from firecaffe.shrink.pruning_rounds import rounds_of
from firecaffe.shrink.scheme import Scheme, scheme_of
from firecaffe.solvers.config import SolverConfig

RUN = Recipe(
    model=ModelConfig("lenet", weights="runs/trained"),
    train=TrainConfig(64, 16, epochs=3, stop_after=2),
    solver=SolverConfig(
        base_lr=0.1, lr_policy="multistep", gamma=0.1, stepvalue=[500], weight_decay=0.01
    ),
)
TWICE = """
[[rounds]]
name = "half"
length = 0.5
rate = 0.1
prune_over = 0.25
[rounds.prune]
how = "gradual"
keep = { "*" = 0.3 }
[[rounds]]
name = "rest"
[rounds.prune]
threshold = { "ip*" = 0.8 }
[rounds.solver]
lr_policy = "fixed"
momentum = 0.5
[[rounds]]
name = "share"
[rounds.train]
epochs = 2
[rounds.share]
bits = { "*" = 4 }
[[rounds]]
name = "last"
"""


def scheme(text: str = TWICE) -> Scheme:
    return scheme_of("x", tomllib.loads(text), "scheme x")


def test_each_begins_with_the_weights_of_the_one_before() -> None:
    trials = rounds_of(RUN, scheme(), 1000, Path("out"))
    assert [trial.name for trial in trials] == ["1-half", "2-rest", "3-share", "4-last"]
    assert [trial.recipe.model.weights for trial in trials] == [
        "runs/trained",
        "out/1-half",
        "out/2-rest",
        "out/3-share",
    ]


def test_length_and_rate_are_shares_of_the_runs() -> None:
    first, second, third, _ = (each.recipe for each in rounds_of(RUN, scheme(), 1000, Path()))
    assert (first.train.steps, first.train.epochs, first.train.stop_after) == (500, 0, 0)
    assert first.solver.base_lr == pytest.approx(0.01)
    assert first.prune.steps == 125
    assert (second.train.steps, second.solver.base_lr) == (1000, 0.1)
    assert (third.train.steps, third.train.epochs) == (0, 2)


def test_the_rate_falls_by_a_cosine_unless_a_round_says_otherwise() -> None:
    first, second, *_ = (each.recipe.solver for each in rounds_of(RUN, scheme(), 1000, Path()))
    assert (first.lr_policy, first.stepvalue, first.gamma) == ("cosine", [], 0.0)
    assert (first.weight_decay, first.momentum) == (0.01, 0.9)
    assert (second.lr_policy, second.momentum) == ("fixed", 0.5)


def test_what_is_zero_stays_zero_and_what_is_shared_stays_shared() -> None:
    _, _, third, fourth = (each.recipe for each in rounds_of(RUN, scheme(), 1000, Path()))
    assert third.prune == PruneConfig(keep={"ip*": 1.0})
    assert (fourth.prune, fourth.share) == (third.prune, third.share)
    assert fourth.share.bits == {"*": 4}


def test_a_run_that_was_pruned_itself_stays_so() -> None:
    pruned = PruneConfig(keep={"ip1": 0.1}, how="gradual", steps=700)
    run = Recipe(model=RUN.model, prune=pruned)
    (only,) = rounds_of(run, scheme("[[rounds]]\n[rounds.share]\nbits = {ip1 = 5}"), 9, Path())
    assert only.recipe.prune == PruneConfig(keep={"ip1": 1.0})


def test_a_choice_takes_the_place_of_patterns_round_by_round() -> None:
    """Both rounds that prune keep the same part of what there was."""
    choice = {"conv1": LayerChoice(0.64, 6), "ip1": LayerChoice(0.01, 3)}
    first, second, third, _ = (
        each.recipe for each in rounds_of(RUN, scheme(), 1000, Path(), choice)
    )
    assert first.prune.keep == pytest.approx({"conv1": 0.8, "ip1": 0.1})
    assert second.prune.keep == pytest.approx({"conv1": 0.64, "ip1": 0.01})
    assert second.prune.threshold == {}
    assert third.share.bits == {"conv1": 6, "ip1": 3}


def test_a_share_of_steps_that_nobody_knows() -> None:
    text = '[[rounds]]\nprune_over = 0.5\n[rounds.prune]\nkeep = {"*" = 0.5}\n'
    with pytest.raises(RecipeError, match="round 'round': prune_over is a share"):
        rounds_of(RUN, scheme(f"{text}[rounds.train]\nepochs = 1\n"), 100, Path())
