"""What a recipe asks of the number of ranks: of each number of hosts that a run may come to."""

from typing import Any

import pytest

from firecaffe import ExchangeConfig, Recipe, SynchronyConfig, TrainConfig
from firecaffe.errors import RecipeError
from firecaffe.parallel.config import ParallelConfig
from firecaffe.recipe.ranks import check_hosts, check_ranks
from firecaffe.recipe.sections import check_recipe
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


def test_samples_come_in_turn_between_cpus_alone() -> None:
    words = ParallelConfig(0, 2, HEAD, 2, TRICK, exchange="in_turn")
    recipe = Recipe(parallel=words, train=TrainConfig(64, 8))
    check_ranks(recipe, 4, 4, on_gpus=False)
    with pytest.raises(RecipeError, match=r"^parallel\.exchange in_turn on GPUs"):
        check_ranks(recipe, 4, 4, on_gpus=True)
    alone = ParallelConfig(0, 1, HEAD, 2, TRICK, exchange="in_turn")  # each has the whole model
    check_ranks(Recipe(parallel=alone, train=TrainConfig(64, 8)), 4, 4, on_gpus=True)


def test_ranks_that_write_to_one_memory_are_of_one_host_and_its_processors() -> None:
    words = SynchronyConfig("asynchronous", lock="none", clock="real")
    recipe = Recipe(synchrony=words)
    check_ranks(recipe, 4, 4, on_gpus=False)
    with pytest.raises(RecipeError, match=r"2 of 4 ranks on this host.* use lock = server"):
        check_ranks(recipe, 4, 2, on_gpus=False)
    with pytest.raises(RecipeError, match="on a GPU"):
        check_ranks(recipe, 1, 1, on_gpus=True)
    with_server: dict[str, Any] = {"mode": "asynchronous", "clock": "real"}
    check_ranks(Recipe(synchrony=SynchronyConfig(**with_server)), 4, 2, on_gpus=True)
