"""exchange.update_at: it decides no bit, and what cannot stand beside it is one line."""

import dataclasses
from typing import Any

import pytest

from firecaffe import (
    DataConfig,
    ExchangeConfig,
    ParallelConfig,
    Recipe,
    SolverConfig,
    SynchronyConfig,
    TrainConfig,
)
from firecaffe.errors import RecipeError
from firecaffe.exchange.route import FOLD, SCHEDULE, find_route
from firecaffe.recipe.identity import identity
from firecaffe.recipe.sections import check_recipe
from firecaffe.recipe.update_at import needs_norms
from firecaffe.training.parts import Parts, check_arguments

SHARDS = ExchangeConfig(update_at="shards")


def test_it_decides_no_bit() -> None:
    assert identity(Recipe(exchange=SHARDS), 10) == identity(Recipe(), 10)


def test_shards_go_by_fold_to_their_owners() -> None:
    route = find_route("tree", 8, 4, 4, shared_memory=True, to_owners=True)
    assert (route.way, route.to_owners, route.is_invariant) == (FOLD, True, True)
    assert not route.shares_memory
    assert route.description == "fold to the owners of shards"
    alone = find_route("tree", 8, 1, to_owners=True)
    assert (alone.way, alone.to_owners) == (SCHEDULE, False)


def test_which_updates_need_norms() -> None:
    assert needs_norms(SolverConfig(type="lamb"))
    assert needs_norms(SolverConfig(type="lars"))
    assert needs_norms(SolverConfig(clip_gradients=1.0))
    assert not needs_norms(SolverConfig(type="adamw"))


@pytest.mark.parametrize("algorithm", ["tree", "auto", "sharded_parameter_server"])
@pytest.mark.parametrize("solver", ["sgd", "lamb"])
def test_what_can_stand_beside_it(algorithm: str, solver: str) -> None:
    words = dataclasses.replace(SHARDS, algorithm=algorithm)
    check_recipe(Recipe(exchange=words, solver=SolverConfig(solver)))


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ({"synchrony": SynchronyConfig("local", replicas=2)}, "synchrony.mode local: not possible"),
        ({"synchrony": SynchronyConfig("stale")}, "synchrony.mode stale: not possible; leave it"),
        ({"exchange": dataclasses.replace(SHARDS, compressor="int8")}, "exchange.compressor int8"),
        ({"exchange": dataclasses.replace(SHARDS, algorithm="ring")}, "ring, which .*; use tree"),
        ({"parallel": ParallelConfig(stages=["a"])}, "parallel.stages"),
        ({"parallel": ParallelConfig(split={"a": "neurons"})}, "parallel.split"),
        ({"parallel": ParallelConfig(scheme="one_weird_trick")}, "parallel.scheme one_weird"),
        ({"train": TrainConfig(autocast="float16")}, "train.autocast float16, whose loss scale"),
        ({"train": TrainConfig(batch_norm_samples=64)}, "train.batch_norm_samples"),
        ({"solver": SolverConfig("torch.optim:Adamax")}, "solver.type torch.optim:Adamax.*lamb up"),
    ],
)
def test_what_cannot(words: dict[str, Any], line: str) -> None:
    with pytest.raises(RecipeError, match=f"exchange.update_at shards with .*{line}"):
        check_recipe(Recipe(**{"exchange": SHARDS, **words}))


def test_a_word_that_is_none() -> None:
    nobody: Any = "nobody"
    with pytest.raises(RecipeError, match=r"exchange\.update_at"):
        check_recipe(Recipe(exchange=ExchangeConfig(update_at=nobody)))


def test_a_hook_takes_whole_gradients() -> None:
    recipe = Recipe(exchange=SHARDS, data=DataConfig("generated"))
    hook: Any = None, print
    with pytest.raises(RecipeError, match=r"exchange\.update_at shards and comm_hook"):
        check_arguments(recipe, Parts(comm_hook=hook), None)
