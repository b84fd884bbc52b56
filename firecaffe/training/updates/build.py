"""Who updates the weights: chosen here, where the training is put together."""

from collections.abc import Mapping
from functools import partial

from torch import nn

from firecaffe.gradients.buckets import ALIGNMENT
from firecaffe.gradients.compressors.codec import ROW
from firecaffe.gradients.probe import Probe
from firecaffe.gradients.shards import make_shards
from firecaffe.recipe.run import Run
from firecaffe.solvers.optimizer import make_optimizer
from firecaffe.training.constraint import make_constraints
from firecaffe.training.ema import Ema
from firecaffe.training.holdings.holding import Holding
from firecaffe.training.parallel.mesh import Mesh
from firecaffe.training.parallel.pieces import InParts
from firecaffe.training.updates.applier import Applier
from firecaffe.training.updates.every_rank import EveryRank
from firecaffe.training.updates.loss_scale import LossScale
from firecaffe.training.updates.shard_owners import ShardOwners, names_of
from firecaffe.training.updates.spread import Among, Part
from firecaffe.training.wholes import OfRanks


def make_update(
    run: Run, holding: Holding, probe: Probe, mesh: Mesh, delayed: int = 0
) -> EveryRank:
    """The update by sums of a step, before it is connected. All ranks call it. delayed: see
    `make_optimizer`.

    Raises: RecipeError.
    """
    recipe, solver = run.recipe, run.recipe.solver
    named, everywhere = holding.named, holding.everywhere
    forward, clip = holding.forward, solver.clip_gradients

    def average_of(weights: Mapping[str, nn.Parameter]) -> Ema | None:
        words = recipe.train
        return Ema(weights, words.ema_decay, words.ema_warmup) if words.ema_decay else None

    if run.route.to_owners:
        buckets = named, probe.ready_order, recipe.exchange.bucket_bytes
        sharers = mesh.sharers
        alignment = ROW if recipe.exchange.codec else ALIGNMENT
        place, is_whole = (sharers.world_size, sharers.rank), recipe.updates_whole_layers
        shards = make_shards(*buckets, *place, is_whole, alignment)
        network = {name: each.dtype for name, each in everywhere.items()}
        parts = {name: Part(name) for name in named}
        groups, knows_loss = [sharers, mesh.row], holding.knows_loss
        spread = Among(groups, network, parts, shards.own, knows_loss)
        optimizer = make_optimizer(everywhere, solver, runs=shards.own)
        scale = LossScale(forward.scaler, optimizer, forward.device)
        in_parts = partial(InParts, names=names_of(shards, everywhere))
        wholes = OfRanks(mesh.world, mesh.row, in_parts, str)
        constraints = make_constraints(recipe, holding.outline, shards.own, wholes)
        applier = Applier(optimizer, scale, constraints, average_of(shards.own))
        return ShardOwners(holding, shards, applier, spread, clip, wholes)
    of_model, names = holding.spread(), holding.whole_name
    optimizer = make_optimizer(everywhere, solver, delayed, called=names, norms=of_model.norms)
    scale = LossScale(forward.scaler, optimizer, forward.device)
    constraints = make_constraints(recipe, holding.outline, named, holding.wholes())
    applier = Applier(optimizer, scale, constraints, average_of(named))
    return EveryRank(holding, applier, of_model, clip)
