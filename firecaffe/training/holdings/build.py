"""Chooses which part of the model each rank holds, when a training is put together."""

from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial

from torch import nn

from firecaffe.cluster.world import World
from firecaffe.data import Batches, Data
from firecaffe.inventory.network_state import check_state
from firecaffe.recipe.run import Run
from firecaffe.tasks import Task
from firecaffe.training.forward import Forward
from firecaffe.training.holdings.holding import Holding
from firecaffe.training.holdings.own_split import OwnSplit, stand_in_of
from firecaffe.training.holdings.split_layers import SplitLayers
from firecaffe.training.holdings.stages import Stages
from firecaffe.training.holdings.whole import Whole
from firecaffe.training.mix import mixing_of
from firecaffe.training.parallel.mesh import Mesh
from firecaffe.training.parallel.network import in_words_of, split_network
from firecaffe.training.parallel.pieces import FreshNetwork
from firecaffe.training.parallel.staged import cut_network
from firecaffe.training.parts import Parts, build_network
from firecaffe.training.updates.part_sums import PartCodec


@dataclass(frozen=True)
class UnheldNetwork:
    outline: nn.Module
    """The network's shapes; the network itself if each rank holds all of it."""
    fresh: FreshNetwork | None


def unheld_network(run: Run, parts: Parts, data: Data, world: World) -> UnheldNetwork:
    """Make the network. Raises: RecipeError; OwnCodeError for errors in a user's code."""
    recipe = run.recipe
    if not (recipe.parallel.is_split or recipe.parallel.stages):
        return UnheldNetwork(build_network(recipe, parts, data.train, world.device), None)
    fresh = FreshNetwork(recipe, parts, data.train)
    check_state(fresh.outline)
    return UnheldNetwork(fresh.outline, fresh)


def hold(
    unheld: UnheldNetwork, run: Run, task: Task, batches: Batches, mesh: Mesh, resources: ExitStack
) -> Holding:
    """Make this rank's holding of a network. All ranks call it. Raises: RecipeError."""
    recipe, words, fresh = run.recipe, run.recipe.parallel, unheld.fresh

    def forward_of(places: nn.Module) -> Forward:
        mixing = mixing_of(recipe.data, recipe.train.seed)
        return Forward(places, task, recipe.train, mixing, words.is_split, mesh.world.device)

    if fresh is None:
        return Whole(forward_of(unheld.outline), unheld.outline, mesh.column)
    with in_words_of(words):
        if words.stages:
            network, staged = cut_network(fresh, words, mesh)
            stages = Stages(forward_of(staged.module), network, staged, run.order)
            resources.callback(stages.close)
            return stages
        network, split = split_network(fresh, words, mesh, recipe.exchange, resources)
    row = split.own_samples
    if row is None:
        return SplitLayers(forward_of(network), network, split)
    codec = partial(_part_codec, run, mesh, resources) if recipe.exchange.codec else None
    stand_in = stand_in_of(batches.train_batch(0, 0))
    return OwnSplit(forward_of(network), network, split, row, run, stand_in, codec)


def _part_codec(
    run: Run, mesh: Mesh, resources: ExitStack, parts: Mapping[str, nn.Parameter]
) -> PartCodec:
    route = run.route
    codec = PartCodec(parts, mesh.column, run.num_leaves, route.codec, route.level)
    return resources.enter_context(closing(codec))
