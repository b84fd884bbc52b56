"""Chooses who updates the weights, when a training is put together."""

from collections.abc import Mapping
from functools import partial

from torch import nn, optim

from firecaffe.gradients.buckets import ALIGNMENT
from firecaffe.gradients.compressors.codec import ROW
from firecaffe.gradients.probe import Probe
from firecaffe.gradients.shards import make_shards
from firecaffe.recipe.run import Run
from firecaffe.recipe.sections import Recipe
from firecaffe.solvers.optimizer import make_optimizer
from firecaffe.training.constraints import make_constraints
from firecaffe.training.evaluation_weights import Ema
from firecaffe.training.holdings.holding import Holding
from firecaffe.training.parallel.mesh import Mesh
from firecaffe.training.parallel.pieces import InParts
from firecaffe.training.updates.applier import Applier
from firecaffe.training.updates.every_rank import EveryRank
from firecaffe.training.updates.loss_scale import LossScale
from firecaffe.training.updates.shard_owners import ShardOwners, names_of
from firecaffe.training.wholes import OfRanks


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
    own, names = shards.own, holding.whole_name
    # Every rank updates the weights that are not shared out.
    own.update({name: each for name, each in holding.named.items() if name not in summed})
    spread = holding.spread_over(mesh.groups, own)
    optimizer = make_optimizer(
        holding.everywhere, solver, runs=own, called=names, norms=spread.norms
    )
    in_parts = partial(InParts, names=names_of(shards, holding.names))
    wholes = OfRanks(mesh.world, mesh.world if is_cut else None, in_parts, names)
    constraints = make_constraints(recipe, holding.outline, own, wholes)
    applier = Applier(optimizer, _scale(holding, optimizer), constraints, _average(recipe, own))
    return ShardOwners(holding, shards, applier, spread, solver.clip_gradients, wholes)


def _scale(holding: Holding, optimizer: optim.Optimizer) -> LossScale:
    return LossScale(holding.forward.scaler, optimizer, holding.forward.device)


def _average(recipe: Recipe, weights: Mapping[str, nn.Parameter]) -> Ema | None:
    words = recipe.train
    return Ema(weights, words.ema_decay, words.ema_warmup) if words.ema_decay else None
