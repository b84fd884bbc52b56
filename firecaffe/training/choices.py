"""Makes a training's network, and chooses, once, its holding, update and mode."""

from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial

from torch import nn, optim

from firecaffe.cluster.world import World
from firecaffe.data import Batches, Data
from firecaffe.gradients.buckets import ALIGNMENT
from firecaffe.gradients.compressors.codec import ROW
from firecaffe.gradients.probe import Probe
from firecaffe.gradients.shards import make_shards
from firecaffe.inventory.network_state import check_state
from firecaffe.recipe.run import Run
from firecaffe.recipe.sections import Recipe
from firecaffe.solvers.optimizer import make_optimizer
from firecaffe.synchrony.config import LOCAL, SHARDED, SynchronyConfig
from firecaffe.tasks import Task
from firecaffe.training.constraints import make_constraints
from firecaffe.training.evaluation_weights import Ema
from firecaffe.training.forward import Forward
from firecaffe.training.given_parts import Parts, build_network
from firecaffe.training.holdings.holding import Holding
from firecaffe.training.holdings.own_split import OwnSplit, stand_in_of
from firecaffe.training.holdings.split_layers import SplitLayers
from firecaffe.training.holdings.stage import Stages
from firecaffe.training.local.build_local import LocalParts, make_local
from firecaffe.training.mix import mixing_of
from firecaffe.training.modes.mode import ModeParts
from firecaffe.training.noise_meter import NoiseMeter
from firecaffe.training.parallel.cut_pieces import FreshNetwork, InParts
from firecaffe.training.parallel.mesh import Mesh
from firecaffe.training.parallel.split_network import in_words_of, split_network
from firecaffe.training.parallel.staged import cut_network
from firecaffe.training.served.build_served import ServedParts, make_served
from firecaffe.training.served.keeper import AtFirst, InShards, Keeper, Lockless
from firecaffe.training.updates.applier import Applier
from firecaffe.training.updates.every_rank import EveryRank
from firecaffe.training.updates.loss_scale import LossScale
from firecaffe.training.updates.part_sums import PartCodec
from firecaffe.training.updates.shard_owners import ShardOwners, names_of
from firecaffe.training.whole_tensors import OfRanks


@dataclass(frozen=True)
class UnheldNetwork:
    outline: nn.Module
    """The network's shapes; the network itself if each rank holds all of it."""
    fresh: FreshNetwork | None

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.outline.parameters())


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
    recipe, parallel, fresh = run.recipe, run.recipe.parallel, unheld.fresh

    def forward_of(places: nn.Module) -> Forward:
        mixing = mixing_of(recipe.data, recipe.train.seed)
        return Forward(places, task, recipe.train, mixing, parallel.is_split, mesh.world.device)

    if fresh is None:
        return Holding(forward_of(unheld.outline), unheld.outline, mesh.column)
    with in_words_of(parallel):
        if parallel.stages:
            network, staged = cut_network(fresh, parallel, mesh)
            stages = Stages(forward_of(staged.module), network, staged, run.order)
            resources.callback(stages.close)
            return stages
        network, split = split_network(fresh, parallel, mesh, recipe.exchange, resources)
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


def make_update(
    run: Run, holding: Holding, probe: Probe, mesh: Mesh, delayed: int = 0
) -> EveryRank:
    """Make the update, which is not connected yet. All ranks call it. Raises: RecipeError."""
    if run.route.to_owners:
        return _owners(run, holding, probe, mesh)
    recipe, solver, named = run.recipe, run.recipe.solver, holding.named
    spread, names = holding.spread(), holding.whole_name
    optimizer = make_optimizer(
        holding.everywhere, solver, delayed, called=names, norms=spread.norms
    )
    constraints = make_constraints(recipe, holding.outline, named, holding.wholes())
    applier = Applier(optimizer, _scale(holding, optimizer), constraints, _average(recipe, named))
    return EveryRank(holding, applier, spread, solver.clip_gradients)


def _owners(run: Run, holding: Holding, probe: Probe, mesh: Mesh) -> ShardOwners:
    recipe, solver = run.recipe, run.recipe.solver
    sharers, summed = mesh.sharers, holding.summed
    buckets = summed, probe.order_of(holding.named, summed), recipe.exchange.bucket_bytes
    alignment = ROW if recipe.exchange.codec else ALIGNMENT
    is_cut = bool(holding.split_layers)  # split layers are not always cut by rows
    place, is_whole = (sharers.world_size, sharers.rank), is_cut or recipe.updates_whole_layers
    shards = make_shards(*buckets, *place, is_whole, alignment)
    local_weights, names = shards.own, holding.whole_name
    # Every rank updates the weights that are not shared out.
    local_weights.update(
        {name: parameter for name, parameter in holding.named.items() if name not in summed}
    )
    spread = holding.spread_over(mesh.groups, local_weights)
    optimizer = make_optimizer(
        holding.everywhere, solver, runs=local_weights, called=names, norms=spread.norms
    )
    in_parts = partial(InParts, names=names_of(shards, holding.names))
    wholes = OfRanks(mesh.world, mesh.world if is_cut else None, in_parts, names)
    constraints = make_constraints(recipe, holding.outline, local_weights, wholes)
    applier = Applier(
        optimizer, _scale(holding, optimizer), constraints, _average(recipe, local_weights)
    )
    return ShardOwners(holding, shards, applier, spread, solver.clip_gradients, wholes)


def _scale(holding: Holding, optimizer: optim.Optimizer) -> LossScale:
    return LossScale(holding.forward.scaler, optimizer, holding.forward.device)


def _average(recipe: Recipe, weights: Mapping[str, nn.Parameter]) -> Ema | None:
    config = recipe.train
    return Ema(weights, config.ema_decay, config.ema_warmup) if config.ema_decay else None


def make_mode(run: Run, update: EveryRank, mesh: Mesh, learners: int) -> ModeParts:
    """Make the recipe's mode; a server begins with `learners` learners. Raises: RecipeError."""
    synchrony = run.recipe.synchrony
    if synchrony.is_served:
        keeper = _keeper(synchrony, mesh.sharers.world_size)
        return ServedParts(update, make_served(run, update, keeper, learners))
    if synchrony.mode == LOCAL:
        return LocalParts(update, make_local(run, mesh.sharers.rank, update))
    return ModeParts(update)


def make_noise_meter(run: Run, update: EveryRank, mode: ModeParts) -> NoiseMeter:
    """Make what measures the gradient noise scale, if ranks have the norms for it."""
    has_norms = (
        update.holding.has_whole_gradients
        and run.route.is_mean
        and mode.updates_by_batch
        and not run.recipe.exchange.in_shards  # by the recipe: a single worker has no shards
        and not update.applier.constraints  # some directions of the gradient would have no effect
    )
    return NoiseMeter(run.order, run.steps, has_norms)


def _keeper(synchrony: SynchronyConfig, world_size: int) -> Keeper:
    if synchrony.is_lockless:
        return Lockless()
    return InShards() if synchrony.server == SHARDED and world_size > 1 else AtFirst()
