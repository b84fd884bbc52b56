"""Words that have no effect: the table against what the code does with them, and how it is said."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from firecaffe.api.recipe_argument import recipe_of
from firecaffe.cli.arguments import Parser
from firecaffe.cli.plan import make_parser as of_plan
from firecaffe.cli.same_bits import make_parser_demo as of_demo
from firecaffe.cli.same_bits import make_parser_verify as of_verify
from firecaffe.cli.train import make_parser as of_train
from firecaffe.cli.tune import make_parser as of_tune
from firecaffe.cli.typed_recipe import parse_recipe
from firecaffe.errors import RecipeError
from firecaffe.recipe.checked_recipe import check_recipe
from firecaffe.recipe.idle_settings import EFFECTIVE_IF, idle_settings
from firecaffe.recipe.sections import Recipe, flatten
from firecaffe.recipe.terms import words_of
from firecaffe.solvers.config import SolverConfig
from firecaffe.solvers.optimizer import SOLVERS, make_optimizer
from firecaffe.solvers.rate_policy import POLICIES, learning_rate
from tests.kit.training import recipe_with

OF_POLICY: dict[str, Any] = {"gamma": 0.4, "power": 0.7, "stepsize": 4, "stepvalue": [2, 5]}
OF_POLICY |= {"pct_start": 0.6, "div_factor": 3.0, "final_div_factor": 7.0}
OF_SOLVER = {"momentum": 0.3, "momentum2": 0.5, "trust": 0.5, "rms_decay": 0.3, "delta": 0.5}


SIMULATED = {"synchrony.mode": "asynchronous", "synchrony.clock": "simulated"}


def rates(solver: SolverConfig) -> list[float]:
    return [learning_rate(solver, i, 10) for i in range(10)]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_s_words(policy: str) -> None:
    words: dict[str, Any] = {"gamma": 0.5, "power": 2.0, "stepsize": 3, "stepvalue": [3]}
    solver = SolverConfig(base_lr=0.1, lr_policy=policy, **words)
    for word, value in OF_POLICY.items():
        counts = rates(solver) != rates(replace(solver, **{word: value}))
        assert counts == EFFECTIVE_IF[f"solver.{word}"].holds({"solver.lr_policy": policy}), word


def trained(solver: SolverConfig) -> torch.Tensor:
    weight = nn.Parameter(torch.linspace(1, 2, 4).reshape(2, 2))
    optimizer = make_optimizer({"weight": weight}, solver)
    for factor in (1.0, -0.5, 2.0):  # a rule of signs sees what changes its sign
        weight.grad = weight.detach() * factor
        optimizer.step()
    return weight.detach()


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_solver_s_words(solver: str) -> None:
    config = SolverConfig(type=solver, base_lr=0.1)
    for word, value in OF_SOLVER.items():
        changed = replace(config, **{word: value})  # type: ignore[arg-type]
        counts = not torch.equal(trained(config), trained(changed))
        assert counts == EFFECTIVE_IF[f"solver.{word}"].holds({"solver.type": solver}), word


def test_every_row_speaks_of_words_that_are_there() -> None:
    words = flatten(Recipe())
    for word, condition in EFFECTIVE_IF.items():
        assert {word, *words_of((condition,))} <= set(words)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "recipe.toml"


def test_in_a_file_it_is_said_and_typed_it_is_refused(path: Path) -> None:
    path.write_text("[exchange]\ncompressor_level = 1\n[data]\ncache_bytes = 9\n")
    said = idle_settings(recipe_of(path))
    assert set(said) == {"exchange.compressor_level", "data.cache_bytes"}
    assert "exchange.compressor is 'none'" in said["exchange.compressor_level"]
    typed = [str(path), "--exchange.compressor_level", "2"]
    with pytest.raises(RecipeError, match=r"_level 2 has no effect: exchange\.compressor"):
        parse_recipe(of_train(), typed)
    parse_recipe(of_plan(has_recipe=True), [*typed, "--compressors", "int8"])
    parse_recipe(of_train(), [*typed, "--exchange.compressor", "int8"])


@pytest.mark.parametrize(
    ("parser", "word", "reason"),
    [
        (of_verify(), "train.steps", "--steps"),
        (of_verify(), "run.folder", "its own folder"),
        (of_demo(), "run.digests", "its own folder"),
        (of_tune(), "run.folder", "--out"),
        (of_plan(has_recipe=True), "exchange.algorithm", "--exchanges"),
    ],
)
def test_words_that_a_command_sets(path: Path, parser: Parser, word: str, reason: str) -> None:
    path.touch()
    value = {"train.steps": "3", "exchange.algorithm": "ring", "run.digests": "true"}.get(word, "x")
    said = f"--{word} has no effect on {parser.command}: .*{reason}"
    with pytest.raises(RecipeError, match=said):
        parse_recipe(parser, [str(path), f"--{word}", value])


def test_words_of_files_count_beside_a_net_of_caffes(path: Path) -> None:
    text = '[data]\nname = "caffe:net.prototxt"\npath = "x"\ndecode_threads = 2\nresize = 9\n'
    path.write_text(text)
    assert set(idle_settings(recipe_of(path))) == {"data.resize"}
    path.write_text(text.replace("caffe:net.prototxt", "generated"))
    assert "caffe:PATH" in idle_settings(recipe_of(path))["data.path"]


@pytest.mark.parametrize(
    ("words", "counts"),
    [
        ({"data.args": {"k": 1}}, {"data.name": "own:images"}),
        ({"parallel.parts": 4}, {"parallel.split": {"a": "neurons"}}),
        ({"parallel.model": 2}, {"parallel.stages": ["a"]}),
        ({"prune.how": "gradual", "prune.steps": 5}, {"prune.keep": {"*": 0.1}}),
        ({"solver.base_momentum": 0.5, "solver.lr_policy": "one_cycle"}, {"solver.type": "sgd"}),
        ({"solver.momentum_correction": True}, {"solver.momentum_form": "caffe"}),
        ({"synchrony.server": "sharded", **SIMULATED}, {"synchrony.clock": "real"}),
        ({"synchrony.in_flight": 2, **SIMULATED}, {"synchrony.clock": "real"}),
        ({"synchrony.lock": "none", **SIMULATED}, {"synchrony.clock": "real"}),
    ],
)
def test_words_beside_those_with_which_they_count(
    words: dict[str, Any], counts: dict[str, Any]
) -> None:
    """They are accepted either way: without the others they are reported."""
    solver = "rmsprop" if "solver.type" in counts else "sgd"
    idle = recipe_with({"solver.type": solver, **words})
    check_recipe(idle)
    assert next(iter(words)) in idle_settings(idle)
    assert idle_settings(idle).keys() <= words.keys()
    assert not idle_settings(recipe_with({**words, **counts}))


@pytest.mark.parametrize(
    ("text", "idle"),
    [
        ("synchrony.lock=none synchrony.clock=simulated train.ema_decay=0.9", "synchrony.lock"),
        ("synchrony.server=sharded synchrony.clock=simulated solver.type=a:B", "synchrony.server"),
        ("solver.decay_form=decoupled solver.type=adagrad", "solver.decay_form"),
    ],
)
def test_a_word_without_effect_refuses_nothing(text: str, idle: str) -> None:
    recipe = recipe_with(f"synchrony.mode=asynchronous {text}")
    assert idle in idle_settings(recipe)
    check_recipe(recipe)


def test_a_word_counts_only_beside_one_that_counts() -> None:
    """A clock without a server is none, and so are the speeds of its learners."""
    said = idle_settings(recipe_with("synchrony.clock=simulated synchrony.speeds=gamma"))
    assert said.keys() == {"synchrony.clock", "synchrony.speeds"}
    assert "none either" in said["synchrony.speeds"]
    local = "synchrony.mode=local synchrony.shares=measured train.global_batch_size=128"
    assert idle_settings(recipe_with(local)).keys() == {"synchrony.shares"}


def test_words_of_masks_and_shared_values() -> None:
    """That are not there, or final at once."""
    words = {"prune.keep": {"a": 0.1}, "prune.steps": 5, "prune.every": 7}
    assert {*idle_settings(recipe_with(words))} == {"prune.steps", "prune.every"}
    idle = {"prune.scope": "all", "share.start": "random", "share.train": False}
    assert {*idle_settings(recipe_with(idle))} == {*idle}
    counts = {"prune.how": "gradual", "prune.steps": 10, "share.bits": {"*": 4}}
    assert not idle_settings(recipe_with({"prune.keep": {"*": 0.1}, **counts}))
