"""Makes a training's network, and chooses its holding, update and mode, once, in three tables."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial

from torch import nn

from firecaffe.cluster.group import Group
from firecaffe.cluster.world import World
from firecaffe.data import Batches, Data
from firecaffe.gradients.buckets import ALIGNMENT
from firecaffe.gradients.compressors.codec import ROW
from firecaffe.gradients.config import ALL, SHARDS
from firecaffe.gradients.probe import Probe
from firecaffe.gradients.shards import make_shards
from firecaffe.inventory.network_state import check_state
from firecaffe.parallel.config import LAYERS, LAYERS_OF_OWN_SAMPLES, STAGES, WHOLE, ParallelConfig
from firecaffe.recipe.run import Run
from firecaffe.solvers.optimizer import make_optimizer
from firecaffe.synchrony.config import EVERY_STEP, LOCAL, SERVED
from firecaffe.tasks import Task
from firecaffe.training.constraints import make_constraints
from firecaffe.training.evaluation_weights import average_of
from firecaffe.training.forward import Forward
from firecaffe.training.given_parts import Parts, build_network
from firecaffe.training.holdings.holding import Holding
from firecaffe.training.holdings.split_layers import OwnSplit, SplitLayers, stand_in_of
from firecaffe.training.holdings.stage import Stages
from firecaffe.training.modes.local_mode import Local
from firecaffe.training.modes.mode import ModeParts
from firecaffe.training.modes.served.served_mode import Served
from firecaffe.training.outcome import NoiseMeter
from firecaffe.training.parallel.cut_pieces import FreshNetwork, GatheredWholes
from firecaffe.training.parallel.mesh import Mesh
from firecaffe.training.parallel.split_network import naming_settings, split_network
from firecaffe.training.parallel.staged import cut_network
from firecaffe.training.piece import Wholes
from firecaffe.training.sample_mixing import mixing_of
from firecaffe.training.updates.every_rank import Applier, EveryRank
from firecaffe.training.updates.part_sums import PartCodec
from firecaffe.training.updates.shard_owners import ShardOwners, names_of
from firecaffe.training.updates.spread import LossScale, Spread
from firecaffe.user_code import is_reference


@dataclass(frozen=True)
class UnsplitNetwork:
    outline: nn.Module
    """The network's shapes; the network itself if each rank holds all of it."""
    fresh: FreshNetwork | None

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.outline.parameters())


def make_unsplit(run: Run, parts: Parts, data: Data, world: World) -> UnsplitNetwork:
    """Make the network. Raises: RecipeError; OwnCodeError for errors in a user's code."""
    recipe = run.recipe
    if recipe.parallel.is_whole:
        return UnsplitNetwork(build_network(recipe, parts, data.train, world.device), None)
    fresh = FreshNetwork(recipe, parts, data.train)
    check_state(fresh.outline)
    return UnsplitNetwork(fresh.outline, fresh)


@dataclass(frozen=True)
class Making:
    unsplit: UnsplitNetwork
    run: Run
    task: Task
    batches: Batches
    mesh: Mesh
    resources: ExitStack

    @property
    def parallel(self) -> ParallelConfig:
        return self.run.recipe.parallel

    @property
    def fresh(self) -> FreshNetwork:
        assert self.unsplit.fresh is not None
        return self.unsplit.fresh

    def forward(self, places: nn.Module) -> Forward:
        recipe, device = self.run.recipe, self.mesh.world.device
        mixing = mixing_of(recipe.data, recipe.train.seed)
        return Forward(
            model=places,
            task=self.task,
            config=recipe.train,
            mixing=mixing,
            is_split=self.parallel.is_split,
            device=device,
            outline=self.unsplit.outline,
        )


def _hold_whole(m: Making) -> Holding:
    return Holding(m.forward(m.unsplit.outline), m.unsplit.outline, m.mesh.column)


def _hold_layers(m: Making) -> Holding:
    network, split = split_network(m.fresh, m.parallel, m.mesh, m.run.recipe.exchange, m.resources)
    return SplitLayers(m.forward(network), network, split)


def _hold_layers_of_own_samples(m: Making) -> Holding:
    exchange = m.run.recipe.exchange
    network, split = split_network(m.fresh, m.parallel, m.mesh, exchange, m.resources)
    codec = partial(_part_codec, m.run, m.mesh, m.resources) if exchange.codec else None
    stand_in = stand_in_of(m.batches.train_batch(0, 0))
    return OwnSplit(m.forward(network), network, split, m.run, stand_in, codec)


def _hold_stage(m: Making) -> Holding:
    network, staged = cut_network(m.fresh, m.parallel, m.mesh)
    stages = Stages(m.forward(staged.module), network, staged, m.run.order)
    m.resources.callback(stages.close)
    return stages


HOLDINGS: Mapping[str, Callable[[Making], Holding]] = {
    WHOLE: _hold_whole,
    LAYERS: _hold_layers,
    LAYERS_OF_OWN_SAMPLES: _hold_layers_of_own_samples,
    STAGES: _hold_stage,
}
"""Makers of holdings by `ParallelConfig.holding`."""


def hold(making: Making) -> Holding:
    """Make this rank's holding of a network. All ranks call it. Raises: RecipeError."""
    with naming_settings(making.parallel):
        return HOLDINGS[making.parallel.holding](making)


def _part_codec(
    run: Run, mesh: Mesh, resources: ExitStack, parts: Mapping[str, nn.Parameter]
) -> PartCodec:
    route = run.route
    codec = PartCodec(parts, mesh.column, run.num_leaves, route.codec, route.level)
    return resources.enter_context(closing(codec))


def _every_rank(run: Run, holding: Holding, probe: Probe, mesh: Mesh, delayed: int) -> EveryRank:
    spread, weights = holding.spread(), holding.named
    applier = _applier(run, holding, spread, weights, holding.wholes(), delayed=delayed)
    return EveryRank(holding, applier, spread, run.recipe.solver.clip_gradients)


def _shard_owners(run: Run, holding: Holding, probe: Probe, mesh: Mesh, delayed: int) -> EveryRank:
    recipe = run.recipe
    sharers, summed = mesh.sharers, holding.summed
    is_cut = bool(holding.split_layers)  # split layers are not always cut by rows
    shards = make_shards(
        summed,
        probe.order_of(holding.named, summed),
        recipe.exchange.bucket_bytes,
        sharers.world_size,
        sharers.rank,
        whole=is_cut or recipe.updates_whole_layers,
        alignment=ROW if recipe.exchange.codec else ALIGNMENT,
    )
    local_weights = shards.own
    # Every rank updates the weights that are not shared out.
    local_weights |= {name: p for name, p in holding.named.items() if name not in summed}
    spread = holding.spread_over(mesh.groups, local_weights)
    names = names_of(shards, holding.names)
    wholes = GatheredWholes(mesh.world, mesh.world if is_cut else None, names)
    applier = _applier(run, holding, spread, local_weights, wholes, runs=local_weights)
    return ShardOwners(holding, shards, applier, spread, recipe.solver.clip_gradients, wholes)


def _applier(
    run: Run,
    holding: Holding,
    spread: Spread,
    weights: Mapping[str, nn.Parameter],
    wholes: Wholes,
    delayed: int = 0,
    runs: Mapping[str, nn.Parameter] | None = None,
) -> Applier:
    optimizer = make_optimizer(
        holding.everywhere, run.recipe.solver, delayed, runs, holding.whole_name, spread.norms
    )
    scale = LossScale(holding.forward.scaler, optimizer, holding.forward.device)
    constraints = make_constraints(run.recipe, holding.outline, weights, wholes)
    train, is_own = run.recipe.train, is_reference(run.recipe.solver.type)
    seed = train.seed if is_own else None
    return Applier(optimizer, scale, constraints, average_of(train, weights), seed)


UPDATES: Mapping[str, Callable[[Run, Holding, Probe, Mesh, int], EveryRank]] = {
    ALL: _every_rank,
    SHARDS: _shard_owners,
}
"""Makers of updates by `exchange.update_at`; a single worker has no shards."""


def make_update(run: Run, holding: Holding, probe: Probe, mesh: Mesh, delayed: int) -> EveryRank:
    """Make the update, which is not connected yet. All ranks call it. Raises: RecipeError."""
    update_at = run.recipe.exchange.update_at if run.route.world_size > 1 else ALL
    return UPDATES[update_at](run, holding, probe, mesh, delayed)


MODES: Mapping[str, Callable[[Run, EveryRank, Group, int], ModeParts]] = {
    EVERY_STEP: lambda run, update, sharers, learners: ModeParts(update),
    LOCAL: lambda run, update, sharers, learners: Local(run, update, sharers.rank),
    **dict.fromkeys(
        SERVED,
        lambda run, update, sharers, learners: Served(run, update, learners, sharers.world_size),
    ),
}
"""Makers of modes by `SynchronyConfig.mode`."""


def make_mode(run: Run, update: EveryRank, mesh: Mesh, learners: int) -> ModeParts:
    """Make the recipe's mode; a server begins with `learners` learners. Raises: RecipeError."""
    return MODES[run.recipe.synchrony.mode](run, update, mesh.sharers, learners)


def make_noise_meter(run: Run, update: EveryRank, mode: ModeParts) -> NoiseMeter:
    """Make the meter of the gradient noise scale. It measures nothing if ranks lack the norms."""
    has_norms = (
        update.holding.has_whole_gradients
        and run.route.is_mean
        and mode.updates_by_batch
        and not run.recipe.exchange.in_shards  # by the recipe: a single worker has no shards
        and not update.applier.constraints  # some directions of the gradient would have no effect
    )
    return NoiseMeter(run.order, run.steps, has_norms)
