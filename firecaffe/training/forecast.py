"""The planner's forecast in a run's folder. The training itself does not know the planner."""

from collections.abc import Mapping
from pathlib import Path

from firecaffe.cluster.world import World
from firecaffe.data import Data
from firecaffe.exchange.route import HOOK
from firecaffe.plan.of_recipe import write_forecast
from firecaffe.recipe.run import Run
from firecaffe.training.parts import Parts


def keep_forecast(
    folder: Path,
    run: Run,
    data: Data,
    world: World,
    parts: Parts,
    chosen: Mapping[str, str] | None,
) -> list[str]:
    """Write the planner's forecast on rank 0, and return lines about it. chosen: the split layers.

    Not for a network given as a Python object, which may be the very one that is trained, or if a
    hook sums the gradients. Raises: RecipeError if the recipe's cluster is invalid.
    """
    if not world.is_first or parts.model is not None or run.route.way == HOOK:
        return []
    ranks = world.world_size, world.local_world_size, world.device
    words = run.route.algorithm, run.rounds, chosen
    return write_forecast(folder, run.recipe, data, *ranks, *words)
