"""What a finished training leaves in result.json."""

import dataclasses
from math import ceil
from typing import Any

from firecaffe.cluster.world import World
from firecaffe.data import Data
from firecaffe.output import LOST
from firecaffe.parallel.pipeline import idle_share
from firecaffe.recipe.identity import tuned_by
from firecaffe.recipe.run import Run
from firecaffe.reference import without_folder
from firecaffe.training.balance import Balance
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
    balance: Balance | None,
    start: Start,
) -> dict[str, Any]:
    """The record, but for the plug-ins' names. choice: the exchange's, if `auto` has chosen it."""
    recipe, served, local = run.recipe, learner.served, learner.local
    return {
        **result.as_row(),
        "model": without_folder(recipe.model.name),
        "first_weights": learner.first_weights and learner.first_weights.as_dict(),
        "frozen_parameters": len(frozen.names),
        "world_size": world.world_size,
        "initial_lr": recipe.solver.base_lr * run.rate_scale,
        "exchange": run.route.algorithm,
        "exchange_choice": choice and dataclasses.asdict(choice),
        "route": run.route.description,
        "data": data.description,
        "class_names": data.class_names,
        "samples_seen": run.order.samples_before(result.steps),
        "balance": balance and balance.as_dict(),
        "synchrony": (served and served.row) or (local and local.row(result.steps)),
        "parallel": learner.split and {**learner.split.row, **_idle(run, learner)},
        "tuned": tuned_by(recipe),
        "resumed_from": start.resumed_from,
        "lost_output": dict(LOST),
        "cost_of_determinism": learner.cost_of_determinism,
    }


def _idle(run: Run, learner: Learner) -> dict[str, float]:
    """The idle share of stages that have equal work, beside which `idle_by_stage` is read."""
    if learner.stage is None:
        return {}
    mesh = learner.stage.staged.mesh
    micro_batches = ceil(run.num_leaves / mesh.column.world_size)
    return {"idle_if_equal": float(idle_share(mesh.row.world_size, micro_batches))}
