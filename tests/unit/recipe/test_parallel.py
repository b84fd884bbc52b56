"""[parallel]: what it decides, which workers it takes, and what cannot stand beside it."""

import dataclasses
from typing import Any

import pytest

from firecaffe import (
    ExchangeConfig,
    ParallelConfig,
    Recipe,
    SolverConfig,
    SynchronyConfig,
    TrainConfig,
)
from firecaffe.errors import RecipeError
from firecaffe.recipe.checked_recipe import check_recipe
from firecaffe.recipe.identity import identity
from firecaffe.recipe.parallel import (
    Auto,
    Layout,
    layout_of,
)
from firecaffe.recipe.worker_numbers import auto_of, check_ranks

HEAD = {"classifier.*": "neurons"}
TRICK: Any = "one_weird_trick"
IN_STAGES: Any = (0, 1, {}, 0, "none", ["features.6"])


def of(*words: Any) -> dict[str, Any]:
    """What decides bits, of these words of [parallel]."""
    found = identity(Recipe(parallel=ParallelConfig(*words)), 10)
    return {name: value for name, value in found.items() if name.startswith("parallel.")}


def test_parts_decide_bits_and_workers_do_not() -> None:
    assert of() == {}
    assert of(2, 1) == {}
    split = {"parallel.split": HEAD, "parallel.parts": 4}
    assert of(0, 4, HEAD) == of(2, 2, HEAD, 4) == of(1, 1, HEAD, 4, TRICK) == split
    assert of(0, 2, HEAD) == {**split, "parallel.parts": 2}
    # It chooses the layers if nobody else does.
    assert of(1, 2, {}, 2, TRICK)["parallel.scheme"] == TRICK


def test_the_same_split_over_other_workers() -> None:
    words = ParallelConfig(2, 4, HEAD)
    assert words.over(1, 1) == ParallelConfig(1, 1, HEAD, 4)
    assert of(2, 4, HEAD) == of(1, 1, HEAD, 4)
    assert ParallelConfig(2).over(1, 1) == ParallelConfig(1)


def test_stages_decide_no_bit() -> None:
    stages = ParallelConfig(2, stages=["a", "b", "c"], pipeline="gpipe")
    assert identity(Recipe(parallel=stages), 10) == identity(Recipe(), 10)
    assert stages.over(1, 1) == ParallelConfig(1, pipeline="gpipe")
    assert layout_of(stages, 8) == Layout(2, 4, shares_samples=True, stages=4)
    assert stages.in_stages(1, 2).stages == ["b"]
    assert stages.in_stages(1, 4) == dataclasses.replace(stages, data=1)
    with pytest.raises(RecipeError, match=r"names 4 stages, of which no 3 can be made"):
        stages.in_stages(1, 3)


def test_rows_hold_a_model_and_columns_the_same_parts() -> None:
    layout = layout_of(ParallelConfig(0, 3, HEAD), 6)
    assert layout == Layout(2, 3, shares_samples=True)
    assert layout.rows == [range(3), range(3, 6)]
    assert [list(column) for column in layout.columns] == [[0, 3], [1, 4], [2, 5]]
    assert (layout.sharers, layout_of(ParallelConfig(2, 3, HEAD, 3, TRICK), 6).sharers) == (2, 6)


def test_stages_whose_layers_are_split() -> None:
    words = ParallelConfig(0, 2, HEAD, 4, stages=["a", "b"])
    layout = layout_of(words, 12)
    assert layout == Layout(2, 6, shares_samples=True, stages=3)
    assert layout.rows == [range(6), range(6, 12)]
    assert layout.of_stages == [range(start, start + 2) for start in range(0, 12, 2)]
    assert [list(each) for each in layout.lines] == [
        *([0, 2, 4], [1, 3, 5]),
        *([6, 8, 10], [7, 9, 11]),
    ]
    assert [list(each) for each in layout.planes] == [[0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 11]]
    assert [list(each) for each in layout.columns] == [[k, 6 + k] for k in range(6)]
    assert layout.sharers == 2
    split = identity(Recipe(parallel=ParallelConfig(1, 1, HEAD, 4)), 10)
    assert identity(Recipe(parallel=words), 10) == split
    assert words.over(1, 1) == ParallelConfig(1, 1, HEAD, 4)
    assert words.in_stages(2, 1) == ParallelConfig(2, 1, HEAD, 4)


@pytest.mark.parametrize(
    ("words", "workers", "line"),
    [
        (
            (0, 2, HEAD, 2, "none", ["a"]),
            6,
            "6 workers with 2 stages of 2 workers: there must be a multiple of 4",
        ),
        ((0, 2, HEAD), 3, "3 workers with parallel.model 2: there must be a multiple of 2"),
        ((2, 2, HEAD), 3, "3 workers with parallel.data 2 and parallel.model 2: there must be 4"),
        ((3,), 2, "2 workers with parallel.data 3 and parallel.model 1: there must be 3"),
        ((0, 4, HEAD), 2, "2 workers with parallel.model 4: there must be a multiple of 4"),
        (IN_STAGES, 3, "3 workers with 2 stages: there must be a multiple of 2"),
        ((2, *IN_STAGES[1:]), 2, "2 workers with parallel.data 2 and 2 stages: there must be 4"),
    ],
)
def test_workers_that_make_no_mesh(words: Any, workers: int, line: str) -> None:
    with pytest.raises(RecipeError) as told:
        layout_of(ParallelConfig(*words), workers)
    assert str(told.value) == line


def test_one_weird_trick_wants_equally_many_micro_batches() -> None:
    def check(samples: int, level: int = 0, scheme: Any = TRICK) -> None:
        exchange = ExchangeConfig(compressor="int8" if level else "none", compressor_level=level)
        words = ParallelConfig(1, 4, HEAD, 4, scheme)
        recipe = Recipe(train=TrainConfig(samples, 8), exchange=exchange, parallel=words)
        check_ranks(recipe, 4, 4, on_gpus=False)

    check(64)
    with pytest.raises(RecipeError, match=r"with 6 micro-batches a step on 4 workers"):
        check(48)
    check(64, level=1)
    with pytest.raises(RecipeError, match=r"on 4 workers, of which 4 are encoded together"):
        check(64, level=2)
    check(48, scheme="none")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ((-1,), "parallel.data is -1; it must be 0 to 4096"),
        ((0, 0), "parallel.model is 0; it must be 1 to 4096"),
        ((0, 2, HEAD, 3), "parallel.parts is 3, which 2 workers cannot hold equally"),
        (
            (0, 4, HEAD, 3),
            "parallel.parts is 3, which 4 workers cannot hold equally (parallel.model); take 4",
        ),
        ((0, 1, {}, 0, "none", ["a", "b", "a"]), "parallel.stages has 'a' twice"),
        ((0, 3, {}, 0, "none", ["a"]), "parallel.model is 3, but parallel.stages names 2 stages"),
    ],
)
def test_words_that_cannot_be(words: Any, line: str) -> None:
    with pytest.raises(RecipeError) as told:
        check_recipe(Recipe(parallel=ParallelConfig(*words)))
    assert str(told.value).startswith(line)


def test_solvers_beside_it() -> None:
    for words in ((0, 2, HEAD), IN_STAGES):
        recipe = Recipe(train=TrainConfig(64, 8, steps=9), parallel=ParallelConfig(*words))
        for solver in (SolverConfig(type="lars"), SolverConfig(clip_gradients=1.0)):
            check_recipe(dataclasses.replace(recipe, solver=solver))


def test_what_auto_may_be() -> None:
    words = ParallelConfig(0, 1, HEAD, 4, "auto")

    def of(micro_batches: int, workers: int, is_dense: bool = True) -> list[tuple[int, int, str]]:
        found = Auto(micro_batches).layouts(words, workers, is_dense)
        assert {(each.parts, tuple(each.split)) for each in found} == {(4, tuple(HEAD))}
        return [(each.data, each.model, each.scheme) for each in found]

    every = [(4, 1, "none"), (2, 2, "none"), (2, 2, TRICK), (1, 4, "none"), (1, 4, TRICK)]
    assert of(8, 4) == every
    assert of(8, 4, is_dense=False) == [each for each in every if each[2] == "none"]
    assert of(6, 4) == [each for each in every if each[2] == "none"]  # 4 do not divide 6
    assert of(2, 4) == [(2, 2, "none"), (1, 4, "none")]
    assert of(8, 3) == [(3, 1, "none")]  # 3 do not hold 4 parts
    # One weird trick on 4 workers has 2 encoded sums of two micro-batches each, or 1 of four.
    by_level = [Auto(8, level).layouts(words, 4) for level in (1, 2)]
    schemes = [{each.scheme for each in found} for found in by_level]
    assert schemes == [{"none", TRICK}, {"none"}]
    assert [max(each.data for each in found) for found in by_level] == [4, 2]
    with pytest.raises(RecipeError, match=r"3 workers cannot share 2 micro-batches .* 4 parts"):
        of(2, 3)


def test_auto_has_what_the_table_leaves() -> None:
    recipe = Recipe(parallel=ParallelConfig(0, 1, HEAD, 4, "auto"))
    assert auto_of(recipe) == Auto(8)
    local = SynchronyConfig("local", replicas=4)
    assert auto_of(dataclasses.replace(recipe, synchrony=local)) == Auto(4, 0, ("none",))


def test_auto_over_other_workers_is_what_it_may_be() -> None:
    assert ParallelConfig(0, 1, HEAD, 4, "auto").over(2, 1) == ParallelConfig(2, 1, HEAD, 4)
    bare = ParallelConfig(0, 1, {}, 4, "auto").over(2, 2)
    assert bare == ParallelConfig(2, 2, {}, 4, TRICK)
