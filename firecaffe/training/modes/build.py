"""Chooses the mode, when a training is put together."""

from firecaffe.recipe.run import Run
from firecaffe.synchrony.config import LOCAL, SHARDED, SynchronyConfig
from firecaffe.training.local.make import LocalParts, make_local
from firecaffe.training.modes.mode import EveryStepParts, ModeParts
from firecaffe.training.parallel.mesh import Mesh
from firecaffe.training.served.keeper import AtFirst, InShards, Keeper, Lockless
from firecaffe.training.served.make import make_served
from firecaffe.training.served.parts import ServedParts
from firecaffe.training.updates.every_rank import EveryRank


def make_mode(run: Run, update: EveryRank, mesh: Mesh, learners: int) -> ModeParts:
    """Make the recipe's mode; a server begins with `learners` learners. Raises: RecipeError."""
    words = run.recipe.synchrony
    if words.is_served:
        keeper = _keeper(words, mesh.sharers.world_size)
        return ServedParts(update, make_served(run, update, keeper, learners))
    if words.mode == LOCAL:
        return LocalParts(update, make_local(run, mesh.sharers.rank, update))
    return EveryStepParts(update)


def _keeper(words: SynchronyConfig, world_size: int) -> Keeper:
    if words.is_lockless:
        return Lockless()
    return InShards() if words.server == SHARDED and world_size > 1 else AtFirst()
