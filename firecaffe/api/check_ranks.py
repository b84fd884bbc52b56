"""What each rank of `firecaffe.check` measures, with all others."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

import torch

from firecaffe.api.console import make_console
from firecaffe.cluster.agree import agree, gather_text
from firecaffe.cluster.world import TIMEOUT_S, World, join
from firecaffe.measure.encoded_sum import make_encoders
from firecaffe.measure.exchange_times import time_exchanges
from firecaffe.measure.found_cluster import MeasuredCluster
from firecaffe.measure.inventory import inventory_of
from firecaffe.measure.ranks_and_links import links_of, look_over
from firecaffe.measure.step_times import (
    MOST_MICRO_BATCHES,
    StepTimes,
    time_steps,
    time_steps_beside_exchange,
)
from firecaffe.planner.codec_cost import MEASURED
from firecaffe.recipe.checked_recipe import CheckedRecipe
from firecaffe.recipe.parallel import layout_of
from firecaffe.runs.environment import cpu_name
from firecaffe.transport.local_ranks import LocalRanks, meet_local_ranks

EXCHANGES = ("tree", "ring", "halving_doubling", "sharded_parameter_server", "native")
"""The last but one stands for all whose messages go straight to owners: shards, codecs of rows."""

SMALL_BYTES = 4096
STEP_S = 1.5
REPETITIONS = 5


@dataclass(frozen=True)
class Look:
    """What ranks measured, the same on all of them."""

    measured: MeasuredCluster
    inventory: dict[str, Any] | None
    """What the network keeps, changes and draws; None without a recipe, and on other ranks."""
    inventory_lines: Sequence[str]
    is_first: bool
    """Whether this is rank 0."""


def look(recipe: CheckedRecipe | None, device: str, folder: str) -> Look:
    """Measure this rank, its links and its steps; all ranks call it."""
    console = make_console(stderr=True)
    with ExitStack() as before:
        before.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1 if recipe is None else recipe.train.threads)
        world = before.enter_context(join(device if recipe is None else recipe.train.device))
        agree(world, {"check options": json.dumps([device, folder])})

        def say(what: str) -> None:
            if world.is_first and console.is_terminal:
                console.print(f"checking: {what:30}", end="\r")

        measured = _look(world, recipe, Path(folder), say)
        inventory = None
        if recipe is not None and world.is_first:
            say("the network")
            inventory = inventory_of(recipe, world.device)
        is_first = world.is_first
    if inventory is None:
        return Look(measured, None, (), is_first)
    return Look(measured, dict(inventory.row), tuple(inventory.lines), is_first)


def _look(
    world: World, recipe: CheckedRecipe | None, folder: Path, say: Callable[[str], None]
) -> MeasuredCluster:
    is_gpu = world.device.type == "cuda"
    name = torch.cuda.get_device_name(world.device) if is_gpu else cpu_name()
    ranks = look_over(world, folder, name, say)
    places = [(rank.host, rank.group) for rank in ranks]
    links = links_of(world, places, say) if world.world_size > 1 else []
    timed: list[list[StepTimes]] = []
    if recipe is not None:
        timed = _steps(world, recipe, say)
    exchanges: dict[str, dict[int, float]] = {}
    slowdown, has_met = 0.0, False
    if world.world_size > 1:
        shares = recipe is None or recipe.exchange.shared_memory
        use_memory = shares and not is_gpu
        local = meet_local_ranks(world, TIMEOUT_S) if use_memory else None
        has_met = local is not None
        try:
            say("exchanges")
            exchanges = _exchanges(world, recipe, local)
            if recipe is not None:
                say("computing beside an exchange")
                slowdown = _slowdown(world, recipe, local, timed)
        finally:
            if local is not None:
                local.close()
    size = world.local_world_size
    return MeasuredCluster(ranks, links, size, timed, exchanges, slowdown, has_met)


def _steps(
    world: World, recipe: CheckedRecipe, say: Callable[[str], None]
) -> list[list[StepTimes]]:
    """The timed steps of three micro-batch sizes, by rank; all ranks get all."""
    size = recipe.train.micro_batch_size
    steps = []
    for count in sorted({max(1, size // 2), size, 2 * size}):
        say(f"steps of {count} samples")
        gather_text(world, "")  # all at once, as in training
        steps.append(time_steps(recipe, world.device, count, STEP_S, _micro_batches(world, recipe)))
    own = [dataclasses.asdict(times) for times in steps]
    stated = [json.loads(text) for text in gather_text(world, json.dumps(own))]
    return [[StepTimes(**_tuples(words)) for words in of_rank] for of_rank in stated]


def _micro_batches(world: World, recipe: CheckedRecipe) -> int:
    """The micro-batches of a timed step: as many as a rank has in training, up to some."""
    sharers = layout_of(recipe.parallel, world.world_size).sharers
    return min(ceil(recipe.train.num_micro_batches / sharers), MOST_MICRO_BATCHES)


def _slowdown(
    world: World,
    recipe: CheckedRecipe,
    local: LocalRanks | None,
    timed: Sequence[Sequence[StepTimes]],
) -> float:
    """How much longer the median rank's step takes beside an exchange, as a share of it."""
    size = recipe.train.micro_batch_size
    alone_s = [median(t.compute_s) for row in timed for t in row if t.micro_batch_size == size]
    gather_text(world, "")
    beside = time_steps_beside_exchange(
        recipe, world, local, size, STEP_S, _micro_batches(world, recipe)
    )
    beside_s = [float(text) for text in gather_text(world, repr(median(beside.compute_s)))]
    return max(0.0, median(beside_s) / median(alone_s) - 1)


def _tuples(words: dict[str, Any]) -> dict[str, Any]:
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in words.items()
    }


def _exchanges(
    world: World, recipe: CheckedRecipe | None, local: LocalRanks | None
) -> dict[str, dict[int, float]]:
    """Median seconds by exchange and bytes, as a training of this recipe would have them."""
    bucket = 4_000_000 if recipe is None else recipe.exchange.bucket_bytes
    names = list(EXCHANGES)
    if recipe is not None and recipe.exchange.algorithm not in (*names, "auto"):
        names.insert(0, recipe.exchange.algorithm)
    sizes = sorted({SMALL_BYTES, max(SMALL_BYTES, bucket // 4 * 4)})
    codec = "" if recipe is None else recipe.exchange.compressor
    encoders = make_encoders([codec] if codec in MEASURED else [])
    timings = time_exchanges(world, names, sizes, REPETITIONS, lambda _: None, local, encoders)
    seconds: dict[str, dict[int, float]] = {}
    for timing in timings:
        seconds.setdefault(timing.algorithm, {})[timing.size_bytes] = timing.time_s
    return seconds
