"""What a recipe asks of the number of ranks, and of hosts that may leave and come."""

import sys

from firecaffe.errors import RecipeError
from firecaffe.exchange import NATIVE, find_schedule
from firecaffe.exchange.choose import AUTO as AUTO_EXCHANGE
from firecaffe.parallel.config import AT_ONCE, AUTO, ParallelConfig
from firecaffe.recipe.config import check_workers
from firecaffe.recipe.local import check_local_workers
from firecaffe.recipe.parallel import Layout, check_layout, layout_of, possible_layouts
from firecaffe.recipe.sections import Recipe
from firecaffe.recipe.served import check_served_workers


def check_hosts(recipe: Recipe, per_host: int, least: int, most: int, on_gpus: bool) -> Layout:
    """Checks a run of so many ranks of each host for each number of hosts, from least to most, that
    it may come to: if one leaves, it has to go on. Returns the layout of most hosts.

    Raises: RecipeError.
    """
    layout = check_ranks(recipe, most * per_host, per_host, on_gpus)
    for hosts in range(most - 1, least - 1, -1):
        try:
            check_ranks(recipe, hosts * per_host, per_host, on_gpus)
        except RecipeError as error:
            raise RecipeError(
                f"--nnodes {least}:{most} may come to {hosts} host{'s' * (hosts > 1)}: {error}; "
                f"{_instead(recipe.parallel, per_host)}give --nnodes one number"
            ) from error
    return layout


def _instead(words: ParallelConfig, per_host: int) -> str:
    if words.data:
        return "leave parallel.data out, or "
    if per_host % words.row_size:
        return f"let each host have a multiple of {words.row_size} (--nproc-per-node), or "
    return ""


def check_ranks(recipe: Recipe, world_size: int, per_host: int, on_gpus: bool) -> Layout:
    """Checks all that depends on the number of ranks. per_host: of these. Returns their layout.

    Raises: RecipeError.
    """
    words, train, exchange = recipe.parallel, recipe.train, recipe.exchange
    if words.scheme == AUTO:  # any of them will do
        leaves = train.num_micro_batches
        words = possible_layouts(words, leaves, world_size, level=exchange.level)[-1]
    layout = layout_of(words, world_size)
    check_layout(layout, words, train, exchange.level)
    check_workers(train, layout.sharers, exchange.level)
    check_served_workers(recipe.synchrony, world_size)
    check_local_workers(recipe.synchrony, layout.sharers, exchange.level)
    _check_messages(words, layout, per_host, on_gpus)
    _check_one_memory(recipe, world_size, per_host, on_gpus)
    if exchange.algorithm not in (NATIVE, AUTO_EXCHANGE):
        try:
            find_schedule(exchange.algorithm, per_host)(world_size, 1)
        except ValueError as error:
            raise RecipeError(f"exchange.algorithm: {error}") from None
    return layout


def _check_messages(words: ParallelConfig, layout: Layout, per_host: int, on_gpus: bool) -> None:
    """Raises: RecipeError if the ranks of a row cannot exchange samples so."""
    if words.exchange != AT_ONCE and layout.model > 1 and on_gpus:
        raise RecipeError(
            f"parallel.exchange {words.exchange} on GPUs: messages come one by one between CPUs "
            "alone; take at_once, or train.device cpu"
        )


def _check_one_memory(recipe: Recipe, world_size: int, per_host: int, on_gpus: bool) -> None:
    """Raises: RecipeError if workers are to write to the same weights, and cannot."""
    if not recipe.synchrony.is_lockless:
        return
    if on_gpus:
        raise RecipeError(
            "synchrony.lock none on a GPU: weights are shared in the host's memory; use "
            "train.device cpu"
        )
    if per_host != world_size or not sys.platform.startswith("linux"):
        raise RecipeError(
            f"synchrony.lock none with {per_host} of {world_size} ranks on this host: all write to "
            "the same memory, of one host with Linux; use lock = server"
        )
