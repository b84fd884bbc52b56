"""The layouts that `verify --layouts` compares, as recipes, and how its trainings end."""

import dataclasses
import os
import signal
from pathlib import Path
from typing import NoReturn

import pytest

from firecaffe import ExchangeConfig, ParallelConfig, Recipe
from firecaffe.api import twins
from firecaffe.api.twins import Twin, folder_of_twins, layouts_of, train_twin
from firecaffe.cluster.launcher import RankFailedError, Settle
from firecaffe.errors import PreemptedError, RecipeError
from firecaffe.faults import Fault
from firecaffe.recipe.checked_recipe import check_recipe
from firecaffe.resume_advice import command_wording

STAGED = Recipe(parallel=ParallelConfig(2, stages=["a", "b", "c"]))
SHARDED = Recipe(exchange=ExchangeConfig(update_at="shards"))
SPLIT = Recipe(parallel=ParallelConfig(split={"*": "neurons"}, parts=4))


def test_stages_of_a_recipe_and_fewer() -> None:
    found = layouts_of("1,data=3,stages=4,stages=2x2", STAGED)
    assert [(each.workers, each.recipe.parallel) for each in found] == [
        (1, ParallelConfig(1)),
        (3, ParallelConfig(3)),
        (4, ParallelConfig(1, stages=["a", "b", "c"])),
        (4, ParallelConfig(2, stages=["b"])),
    ]


def test_one_weird_trick_over_other_workers() -> None:
    trick = ParallelConfig(1, 4, SPLIT.parallel.split, 4, "one_weird_trick")
    found = layouts_of("1,trick=2x2", Recipe(parallel=trick))
    assert [each.recipe.parallel for each in found] == [trick.over(1, 1), trick.over(2, 2)]
    [model, _] = layouts_of("model=2,1", Recipe(parallel=trick))
    assert model.recipe.parallel.scheme == "none"


def test_shards_of_the_update() -> None:
    found = layouts_of("1,data=2,shards=3", SHARDED)
    assert [(each.name, each.workers, each.recipe.exchange.update_at) for each in found] == [
        ("1", 1, "all"),
        ("data=2", 2, "all"),
        ("shards=3", 3, "shards"),
    ]


def test_shards_beside_a_split() -> None:
    both = dataclasses.replace(SHARDED, parallel=SPLIT.parallel)
    found = layouts_of("1,shards=3,model=2x2", both)
    assert [(each.workers, each.recipe.exchange.update_at) for each in found] == [
        (1, "all"),
        (3, "shards"),
        (4, "shards"),
    ]
    assert [each.recipe.parallel for each in found] == [
        SPLIT.parallel.over(*size) for size in ((1, 1), (3, 1), (2, 2))
    ]


def test_stages_whose_layers_are_split_have_equally_many_parts() -> None:
    words = ParallelConfig(0, 2, {"*": "neurons"}, stages=["a"])
    found = layouts_of("1,stages=2,model=2", Recipe(parallel=words))
    assert [each.recipe.parallel.num_parts for each in found] == [2, 2, 2]
    assert [each.recipe.parallel.row_size for each in found] == [1, 2, 2]


@pytest.mark.parametrize(
    ("text", "recipe", "line"),
    [
        ("1,shards=2", SPLIT, "has shards, but exchange.update_at is all"),
        ("1,model=2", SHARDED, "has model, but the recipe has exchange.update_at shards"),
        ("1,stages=3", STAGED, "names 4 stages, of which no 3 can be made"),
        ("1,model=2", STAGED, "has model, but the recipe has parallel.stages"),
        ("1,stages=2", SPLIT, "has stages, but the recipe has no parallel.stages"),
        ("1,stages=0", STAGED, "layouts has 'stages=0'; a layout is 1, data=D"),
        ("1,data=2", Recipe(), "the recipe splits no layer and names no stages"),
        (
            "1,trick=2",
            dataclasses.replace(STAGED, parallel=ParallelConfig()),
            "the recipe splits no layer",
        ),
    ],
)
def test_layouts_that_are_none(text: str, recipe: Recipe, line: str) -> None:
    with pytest.raises(RecipeError, match=line):
        layouts_of(text, recipe)


def test_a_signal_leaves_no_folder_and_no_advice_to_resume_it() -> None:
    def asked_here(_: Path) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    def asked_of_the_ranks(folder: Path) -> None:
        raise PreemptedError(f"resume with --resume {folder}")

    for stop in (asked_here, asked_of_the_ranks):
        with pytest.raises(PreemptedError) as error, folder_of_twins("verify") as folder:
            stop(folder)
        assert not folder.exists()
        assert "resume" not in str(error.value)


def test_a_lost_rank_of_a_twin_has_nothing_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(_: object, __: object, settle: Settle, **___: object) -> NoReturn:
        (tmp_path / "1-worker/checkpoints/step-00000003").mkdir(parents=True)
        fault = Fault("killed", 0, "here", 4, "its launcher", "SIGKILL")
        raise RankFailedError(settle(tmp_path / "1-worker", fault, "the run ended").line, 10)

    monkeypatch.setattr(twins, "launch", lose)
    with command_wording("verify"), pytest.raises(RankFailedError, match=r"start it again$"):
        train_twin(Twin("1", 1, check_recipe(Recipe())), tmp_path)
