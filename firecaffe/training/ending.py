"""What a finished training leaves in result.json."""

import dataclasses
from typing import Any

from firecaffe.cluster.world import World
from firecaffe.data import Data
from firecaffe.output import LOST
from firecaffe.recipe.identity import tuned_by
from firecaffe.recipe.run import Run
from firecaffe.reference import without_folder
from firecaffe.training.balance import MeasuredShares
from firecaffe.training.frozen import Frozen
from firecaffe.training.learner import Learner
from firecaffe.training.result import Result
from firecaffe.training.start import Start
from firecaffe.transport.auto import AutoChoice


def record_of(
    result: Result,
    run: Run,
    learner: Learner,
    world: World,
    data: Data,
    frozen: Frozen,
    choice: AutoChoice | None,
    shares: MeasuredShares | None,
    start: Start,
) -> dict[str, Any]:
    """The record, but for the plug-ins' names. choice: the exchange's, if `auto` has chosen it."""
    recipe = run.recipe
    return {
        **result.as_row(),
        "model": without_folder(recipe.model.name),
        "first_weights": learner.first_weights and learner.first_weights.as_dict(),
        "frozen_parameters": len(frozen.names),
        "inventory": learner.inventory and learner.inventory.row,
        "world_size": world.world_size,
        "initial_lr": recipe.solver.base_lr * run.rate_scale,
        "exchange": run.route.algorithm,
        "exchange_choice": choice and dataclasses.asdict(choice),
        "route": run.route.description,
        "data": data.description,
        "class_names": data.class_names,
        "samples_seen": run.order.samples_before(result.steps),
        "balance": shares and shares.balance.as_dict(),
        "synchrony": learner.mode.row(result.steps),
        "parallel": learner.holding.row(run.num_leaves),
        "tuned": tuned_by(recipe),
        "resumed_from": start.resumed_from,
        "lost_output": dict(LOST),
        "cost_of_determinism": learner.cost_of_determinism,
    }
