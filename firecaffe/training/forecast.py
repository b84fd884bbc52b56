"""The planner's forecast, kept beside a run. The training itself knows no planner."""

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
    """On rank 0, keeps what the planner expects of a run in its folder; returns what is to be said
    of it. chosen: the layers that are split, as of `forecast_run`.

    Nothing is planned of a network that was given as an object of Python, which may be the very one
    that is trained, or where a hook sums the gradients.

    Raises: RecipeError if the recipe's cluster is none.
    """
    if not world.is_first or parts.model is not None or run.route.way == HOOK:
        return []
    ranks = world.world_size, world.local_world_size, world.device
    words = run.route.algorithm, run.rounds, chosen
    return write_forecast(folder, run.recipe, data, *ranks, *words)
