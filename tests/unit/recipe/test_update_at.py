"""exchange.update_at: it decides no bit, and what cannot stand beside it is one line."""

import dataclasses
from typing import Any

import pytest

from firecaffe import (
    ExchangeConfig,
    Recipe,
    SolverConfig,
)
from firecaffe.errors import RecipeError
from firecaffe.exchange.route import FOLD, SCHEDULE, find_route
from firecaffe.recipe.checked_recipe import check_recipe
from firecaffe.recipe.identity import identity
from firecaffe.solvers.config import needs_norms

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


def test_a_word_that_is_none() -> None:
    nobody: Any = "nobody"
    with pytest.raises(RecipeError, match=r"exchange\.update_at"):
        check_recipe(Recipe(exchange=ExchangeConfig(update_at=nobody)))
