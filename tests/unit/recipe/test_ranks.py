"""What a recipe asks of the number of ranks: of each number of hosts that a run may come to."""

from typing import Any

import pytest

from firecaffe import ExchangeConfig, Recipe, SynchronyConfig, TrainConfig
from firecaffe.errors import RecipeError
from firecaffe.parallel.config import ParallelConfig
from firecaffe.recipe.checked_recipe import check_recipe
from firecaffe.recipe.worker_numbers import check_hosts, check_ranks
from tests.unit.recipe.test_parallel import HEAD, IN_STAGES, TRICK


@pytest.mark.parametrize(
    ("words", "per_host", "line"),
    [
        (
            (0, 2, HEAD),
            1,
            "may come to 3 hosts: 3 workers with parallel.model 2: there must be a multiple of 2; "
            "let each host have a multiple of 2 (--nproc-per-node), or give",
        ),
        (
            (2, 2, HEAD),
            1,
            "may come to 3 hosts: 3 workers with parallel.data 2 and parallel.model 2: there must "
            "be 4; leave parallel.data out, or give",
        ),
        (
            (0, 2, HEAD, 2, TRICK),
            2,
            "may come to 3 hosts: parallel.scheme one_weird_trick with 8 micro-batches a step on 6 "
            "workers: they exchange one each at a time, so they must divide them; give",
        ),
    ],
)
def test_each_number_of_hosts_must_have_a_layout(words: Any, per_host: int, line: str) -> None:
    train = TrainConfig(64, 8)
    with pytest.raises(RecipeError) as told:
        check_hosts(Recipe(parallel=ParallelConfig(*words), train=train), per_host, 2, 4, False)
    assert str(told.value) == f"--nnodes 2:4 {line} --nnodes one number"
    fewer = Recipe(parallel=ParallelConfig(0, *words[1:]), train=train)
    check_hosts(fewer, per_host, 2, 2, on_gpus=False)
    check_hosts(Recipe(parallel=ParallelConfig(*IN_STAGES), train=train), 2, 1, 4, on_gpus=False)


@pytest.mark.parametrize(
    ("recipe", "per_host", "hosts", "fewer"),
    [
        (Recipe(synchrony=SynchronyConfig("backup", backup_workers=2)), 1, (1, 3), "2 hosts"),
        (Recipe(exchange=ExchangeConfig("hierarchical(tree,tree)")), 2, (1, 4), ""),
        (
            Recipe(
                exchange=ExchangeConfig(compressor="one_bit", compressor_level=1),
                parallel=ParallelConfig(0, 1, HEAD, 2, TRICK),
                train=TrainConfig(96, 8),
            ),
            1,
            (3, 6),
            "5 hosts",
        ),
    ],
)
def test_each_number_of_hosts_must_do(
    recipe: Recipe, per_host: int, hosts: tuple[int, int], fewer: str
) -> None:
    """What is refused only on fewer hosts would end the run that was to survive the loss of one."""
    check_recipe(recipe)
    least, most = hosts
    check_ranks(recipe, most * per_host, per_host, on_gpus=False)
    if fewer:
        with pytest.raises(RecipeError, match=f"--nnodes {least}:{most} may come to {fewer}: "):
            check_hosts(recipe, per_host, *hosts, on_gpus=False)
    else:
        check_hosts(recipe, per_host, *hosts, on_gpus=False)


def test_what_depends_on_ranks_and_hosts_is_refused_by_the_table() -> None:
    lockless = Recipe(synchrony=SynchronyConfig("asynchronous", lock="none"))
    simulated = Recipe(synchrony=SynchronyConfig("asynchronous", clock="simulated"))
    check_ranks(lockless, 4, 4, on_gpus=False)
    for recipe, ranks, per_host, on_gpus, words in (
        (lockless, 4, 2, False, "2 hosts with synchrony.lock = none"),
        (lockless, 1, 1, True, "workers on GPUs with synchrony.lock = none"),
        (simulated, 2, 2, False, "2 workers with synchrony.clock = simulated"),
    ):
        with pytest.raises(RecipeError, match=words):
            check_ranks(recipe, ranks, per_host, on_gpus)
    served = Recipe(synchrony=SynchronyConfig("asynchronous"))
    check_ranks(served, 4, 2, on_gpus=True)
