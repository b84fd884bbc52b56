"""Which workers a recipe takes, in which layout, and when replicas on them part."""

from contextlib import nullcontext
from dataclasses import replace
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
from firecaffe.data import SampleOrder
from firecaffe.errors import RecipeError
from firecaffe.recipe.checked_recipe import check_recipe
from firecaffe.recipe.run import Ranks, Run
from firecaffe.recipe.worker_numbers import (
    Auto,
    RankLayout,
    auto_of,
    check_hosts,
    check_ranks,
    layout_of,
)
from firecaffe.synchrony.rounds import Rounds
from tests.kit.models_refused import refused
from tests.kit.training import recipe_with

HEAD = {"classifier.*": "neurons"}
TRICK: Any = "one_weird_trick"
IN_STAGES: Any = (0, 1, {}, 0, "none", ["features.6"])


def test_the_same_split_over_other_workers() -> None:
    assert ParallelConfig(2, 4, HEAD).over(1, 1) == ParallelConfig(1, 1, HEAD, 4)
    assert ParallelConfig(2).over(1, 1) == ParallelConfig(1)
    auto = ParallelConfig(0, 1, HEAD, 4, "auto")
    assert auto.over(2, 1) == ParallelConfig(2, 1, HEAD, 4)
    bare = ParallelConfig(0, 1, {}, 4, "auto").over(2, 2)
    assert bare == ParallelConfig(2, 2, {}, 4, TRICK)


def test_stages_over_workers() -> None:
    stages = ParallelConfig(2, stages=["a", "b", "c"], pipeline="gpipe")
    assert stages.over(1, 1) == ParallelConfig(1, pipeline="gpipe")
    assert layout_of(stages, 8) == RankLayout(2, 4, shares_samples=True, stages=4)
    assert stages.in_stages(1, 2).stages == ["b"]
    assert stages.in_stages(1, 4) == replace(stages, data=1)
    with pytest.raises(RecipeError, match=r"names 4 stages, of which no 3 can be made"):
        stages.in_stages(1, 3)


def test_rows_hold_a_model_and_columns_the_same_parts() -> None:
    layout = layout_of(ParallelConfig(0, 3, HEAD), 6)
    assert (layout.rows, layout.sharers) == ([range(3), range(3, 6)], 2)
    assert [list(column) for column in layout.columns] == [[0, 3], [1, 4], [2, 5]]
    assert layout_of(ParallelConfig(2, 3, HEAD, 3, TRICK), 6).sharers == 6
    # Of stages whose layers are split.
    words = ParallelConfig(0, 2, HEAD, 4, stages=["a", "b"])
    layout = layout_of(words, 12)
    assert layout == RankLayout(2, 6, shares_samples=True, stages=3)
    assert layout.rows == [range(6), range(6, 12)]
    assert layout.of_stages == [range(start, start + 2) for start in range(0, 12, 2)]
    assert [list(each) for each in layout.lines] == [
        *([0, 2, 4], [1, 3, 5]),
        *([6, 8, 10], [7, 9, 11]),
    ]
    assert [list(each) for each in layout.planes] == [[0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 11]]
    assert [list(each) for each in layout.columns] == [[k, 6 + k] for k in range(6)]
    assert layout.sharers == 2
    assert words.over(1, 1) == ParallelConfig(1, 1, HEAD, 4)
    assert words.in_stages(2, 1) == ParallelConfig(2, 1, HEAD, 4)


@pytest.mark.parametrize(
    ("words", "workers", "line"),
    [
        ((0, 2, HEAD, 2, "none", ["a"]), 6, "2 stages of 2 workers: there must be a multiple of 4"),
        ((0, 2, HEAD), 3, "parallel.model 2: there must be a multiple of 2"),
        ((2, 2, HEAD), 3, "parallel.data 2 and parallel.model 2: there must be 4"),
        ((3,), 2, "parallel.data 3 and parallel.model 1: there must be 3"),
        ((0, 4, HEAD), 2, "parallel.model 4: there must be a multiple of 4"),
        (IN_STAGES, 3, "2 stages: there must be a multiple of 2"),
        ((2, *IN_STAGES[1:]), 2, "parallel.data 2 and 2 stages: there must be 4"),
    ],
)
def test_workers_that_make_no_mesh(words: Any, workers: int, line: str) -> None:
    with pytest.raises(RecipeError, match=f"^{workers} workers with {line}$"):
        layout_of(ParallelConfig(*words), workers)


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
    assert auto_of(replace(recipe, synchrony=local)) == Auto(4, 0, ("none",))


@pytest.mark.parametrize(
    ("words", "per_host", "named"),
    [
        ((0, 2, HEAD), 1, "3 workers with parallel.model 2: .* let each host have a multiple of 2"),
        ((2, 2, HEAD), 1, "parallel.data 2 and parallel.model 2: .*; leave parallel.data out"),
        ((0, 2, HEAD, 2, TRICK), 2, "parallel.scheme one_weird_trick with 8 .* on 6 workers"),
    ],
)
def test_each_number_of_hosts_must_have_a_layout(words: Any, per_host: int, named: str) -> None:
    train = TrainConfig(64, 8)
    with pytest.raises(RecipeError, match=f"^--nnodes 2:4 may come to 3 hosts: .*{named}.*one num"):
        check_hosts(Recipe(parallel=ParallelConfig(*words), train=train), per_host, 2, 4, False)
    fewer = Recipe(parallel=ParallelConfig(0, *words[1:]), train=train)
    check_hosts(fewer, per_host, 2, 2, on_gpus=False)
    check_hosts(Recipe(parallel=ParallelConfig(*IN_STAGES), train=train), 2, 1, 4, on_gpus=False)


ENCODED = (
    "exchange.compressor=one_bit exchange.compressor_level=1 parallel.scheme=one_weird_trick "
    "parallel.split={'classifier.*':'neurons'} parallel.parts=2 "
    "train.global_batch_size=96 train.micro_batch_size=8"
)


@pytest.mark.parametrize(
    ("words", "per_host", "least", "most", "fewer"),
    [
        ("synchrony.mode=backup synchrony.backup_workers=2", 1, 1, 3, "2 hosts"),
        ("exchange.algorithm=hierarchical(tree,tree)", 2, 1, 4, ""),
        (ENCODED, 1, 3, 6, "5 hosts"),
    ],
)
def test_each_number_of_hosts_does(
    words: str, per_host: int, least: int, most: int, fewer: str
) -> None:
    """What is refused only on fewer hosts would end the run that was to survive the loss of one."""
    recipe = check_recipe(recipe_with(words))
    check_ranks(recipe, most * per_host, per_host, on_gpus=False)
    line = f"--nnodes {least}:{most} may come to {fewer}: "
    with refused(RecipeError, [line]) if fewer else nullcontext():
        check_hosts(recipe, per_host, least, most, on_gpus=False)


def test_what_depends_on_ranks_and_hosts_is_refused_by_the_table() -> None:
    asynchronous = recipe_with("synchrony.mode=asynchronous")
    lockless = recipe_with("synchrony.lock=none", asynchronous)
    simulated = recipe_with("synchrony.clock=simulated", asynchronous)
    check_ranks(lockless, 4, 4, on_gpus=False)
    check_ranks(asynchronous, 4, 2, on_gpus=True)
    for recipe, ranks, per_host, on_gpus, words in (
        (lockless, 4, 2, False, "2 hosts with synchrony.lock = none"),
        (lockless, 1, 1, True, "workers on GPUs with synchrony.lock = none"),
        (simulated, 2, 2, False, "2 workers with synchrony.clock = simulated"),
    ):
        with pytest.raises(RecipeError, match=words):
            check_ranks(recipe, ranks, per_host, on_gpus)


def test_as_many_ranks_as_micro_batches() -> None:
    for world_size in range(1, 9):
        check_ranks(Recipe(), world_size, world_size, on_gpus=False)
    named = ["9 ranks but only 8 micro-batches", "global_batch_size 128", "at most 8 ranks"]
    with refused(RecipeError, [*named, "train.micro_batch_size 16"]):
        check_ranks(Recipe(), 9, 9, on_gpus=False)


LOCAL = Recipe(
    train=TrainConfig(global_batch_size=96, micro_batch_size=8, steps=100),
    synchrony=SynchronyConfig("local", replicas=4, local_steps=8),
)


def test_workers_share_out_replicas() -> None:
    recipe = LOCAL.replace("synchrony.replicas", 6)
    for workers in range(1, 7):
        check_ranks(recipe, workers, workers, on_gpus=False)
    with pytest.raises(RecipeError, match=r"replicas is 6 on 7 workers.*may be 1 to 6 workers"):
        check_ranks(recipe, 7, 7, on_gpus=False)
    encoded = recipe_with("exchange.compressor=int8 exchange.compressor_level=1", recipe)
    check_ranks(encoded, 3, 3, on_gpus=False)
    with pytest.raises(RecipeError, match="6 ranks but only 3 sums of 2 replicas to encode"):
        check_ranks(encoded, 6, 6, on_gpus=False)


def rounds(words: str, solver: SolverConfig | None = None) -> Rounds:
    recipe = recipe_with(words, replace(LOCAL, solver=solver or SolverConfig()))
    order = SampleOrder(0, 960, 96, 8)  # ten steps an epoch
    return Run(check_recipe(recipe), Ranks(), order, {}, "tree").rounds


def test_when_replicas_part() -> None:
    drops = SolverConfig(lr_policy="multistep", gamma=0.1, stepvalue=[40, 60], warmup_steps=5)
    assert rounds("").synchronous == 0
    assert rounds("synchrony.warm_steps=7").synchronous == 7
    assert rounds("synchrony.warm_epochs=2").synchronous == 20
    assert rounds("synchrony.warm_until_drop=True", drops).synchronous == 40
    assert [each.first for each in rounds("synchrony.warm_steps=7").taken(15)] == [7]
    with pytest.raises(RecipeError, match="the rate does not drop in the training's 100 steps"):
        rounds("synchrony.warm_until_drop=True", replace(drops, stepvalue=[100]))
    with pytest.raises(RecipeError, match=r"after 100 synchronous steps.*; fewer steps may be"):
        rounds("synchrony.warm_epochs=10")
    # The quadratic rule follows the policy.
    halves = SolverConfig(base_lr=0.2, lr_policy="multistep", gamma=0.5, stepvalue=[24])
    by_rate = rounds("synchrony.growth_coefficient=1.23", halves)
    assert by_rate.taken(37)  # (1.23 / 0.2)^2 = 37.8
    assert [each.steps for each in by_rate.taken(100)] == [63]  # (1.23 / 0.1)^2 = 151
