"""Replicas that are each held by a row of ranks: any layout comes to the bits of one worker.

Other words of replicas beside layouts are in the matrix (`test_matrix.py`).
"""

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

from firecaffe import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    Recipe,
    SynchronyConfig,
    TrainConfig,
)
from firecaffe.errors import RecipeError
from firecaffe.gradients.reducer import GradientReducer
from firecaffe.recipe.checked_recipe import check_recipe
from firecaffe.runs.rank_times import explain
from firecaffe.runs.run_folder import read_run_file
from firecaffe.training.checks import preflight
from tests.kit.worlds import Trained, Training, changed, checkpoint_of, end
from tests.ranks import test_layouts, test_stage_layouts
from tests.world import Ranks

SYNCHRONY = SynchronyConfig("local", replicas=2, local_steps=3, outer="nesterov")
"""Steps 3 and 6 end an epoch, in which replica 1 has no samples."""

LARS = {"type": "lars", "base_lr": 2.0, "clip_gradients": 0.5}
"""With norms of whole gradients, and of layers; in stages caffe's momentum keeps numbers."""


def often(recipe: Recipe, **solver: Any) -> Recipe:
    train, checkpoint = {"ema_decay": 0.0, "steps": 8}, CheckpointConfig(1, keep_last=0)
    return changed(recipe, train=train, solver=solver, synchrony=SYNCHRONY, checkpoint=checkpoint)


RECIPES = {"split": often(test_layouts.RECIPE, **LARS), "stages": often(test_stage_layouts.RECIPE)}
TRAININGS = {
    "split": Training(test_layouts.Net, 68),
    "stages": Training(test_stage_layouts.Net, 68, 20),
}
HEAD = test_layouts.HEAD
ALONE = {"split": ParallelConfig(split=HEAD, parts=4), "stages": ParallelConfig()}
ROWS = {"split": ParallelConfig(2, 2, HEAD, 4), "stages": ParallelConfig(2, stages=["middle"])}
"""Two rows of one replica each; a layout of one row hosts both."""

STAGES_4 = test_stage_layouts.LAYOUTS["4 stages"]
SLOWMO = {"outer": "slowmo", "inner_momentum": "zero"}
BESIDE = {"fragments": 3, "local_steps": 7, "overlap_steps": 1}


@pytest.mark.parametrize(
    ("kind", "parallel", "words"),
    [("split", ROWS["split"], SLOWMO), ("stages", STAGES_4, BESIDE)],
    ids=["split", "stages"],
)
def test_any_layout(
    trained: Trained, kind: str, parallel: ParallelConfig, words: dict[str, Any]
) -> None:
    """Also from a checkpoint between averages, which has the weights of each replica."""
    recipe = changed(RECIPES[kind], synchrony=words)
    alone = trained(1, changed(recipe, parallel=ALONE[kind]), TRAININGS[kind])
    result = trained(4, changed(recipe, parallel=parallel), TRAININGS[kind])
    assert end(result) == end(alone)
    assert [row["loss"] for row in result.history] == [row["loss"] for row in alone.history]
    record = read_run_file(result.folder, "result.json")["synchrony"]
    assert (record["replicas"], record["synchronous_steps"]) == (2, 0)
    waits = [rank.waits_s for rank in explain(result.folder).ranks]
    assert all(("activations" in each) == (kind == "split") for each in waits)
    if words == BESIDE:
        rows, between = changed(recipe, parallel=ROWS[kind]), checkpoint_of(result, 3)
        assert end(trained(4, rows, TRAININGS[kind], between)) == end(alone)
    else:
        assert record["averages"] == 3


@pytest.mark.parametrize("kind", ALONE)
def test_a_vote_of_one_rank_is_heard_in_all_columns(trained: Trained, kind: str) -> None:
    """Rank 0 alone looks at the time, and asks for a checkpoint after each average."""
    by_time = CheckpointConfig(0, 1e-6, 0)
    recipe = changed(RECIPES[kind], parallel=ROWS[kind], checkpoint=by_time, train={"steps": 4})
    folder = trained(4, recipe, TRAININGS[kind]).folder
    saved = sorted(each.name for each in (folder / "checkpoints").glob("step-*"))
    assert saved == ["step-00000003", "step-00000004"]


@pytest.mark.parametrize("kind", ALONE)
def test_a_number_that_is_not_finite_is_told_by_all_as_by_one(
    ranks: Ranks, kind: str, tmp_path: Path
) -> None:
    solver = {"type": "sgd", "base_lr": 1e30, "clip_gradients": 0.0}
    recipe = changed(RECIPES[kind], solver=solver, train={"eval_every": 0})
    error = TRAININGS[kind].error
    [expected] = ranks.shared(1, error, changed(recipe, parallel=ALONE[kind]), tmp_path / "alone")
    assert "of 2 replicas are not finite" in expected
    rows = changed(recipe, parallel=ROWS[kind])
    assert ranks.shared(4, error, rows, tmp_path / "run") == [expected] * 4


def one_part_diverges(recipe: Recipe, folder: Path) -> str:
    finite = GradientReducer.finite

    def on_one(reducer: GradientReducer) -> Tensor:
        return finite(reducer) & (os.environ["RANK"] != "1")

    with patch.object(GradientReducer, "finite", on_one):
        return TRAININGS["split"].error(recipe, folder)


def test_a_part_that_is_not_finite_is_told_by_the_whole_row(ranks: Ranks, tmp_path: Path) -> None:
    recipe = changed(RECIPES["split"], parallel=test_layouts.LAYOUTS["model 2"])
    [said] = set(ranks.shared(2, one_part_diverges, recipe, tmp_path / "run"))
    assert "of 2 replicas are not finite" in said


def test_rows_are_what_hosts_replicas_before_ranks_start() -> None:
    recipe = Recipe(
        ModelConfig("lenet"),
        DataConfig("generated"),
        TrainConfig(32, 4, steps=6, device="cpu"),
        synchrony=SYNCHRONY,
        parallel=ParallelConfig(2, 2, {"ip1": "neurons"}),
    )
    preflight(check_recipe(recipe), 4)
    with pytest.raises(RecipeError, match="replicas is 2 on 4 workers"):
        preflight(check_recipe(changed(recipe, parallel=ParallelConfig(4))), 4)
