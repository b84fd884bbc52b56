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

OFTEN = CheckpointConfig(1, keep_last=0)
RECIPES = {
    name: changed(recipe, train=train, solver=solver, synchrony=SYNCHRONY, checkpoint=OFTEN)
    for name, recipe, train, solver in (
        # With norms of whole gradients, and of layers; in stages caffe's momentum keeps numbers.
        (
            "split",
            test_layouts.RECIPE,
            {"ema_decay": 0.0, "steps": 8},
            {"type": "lars", "base_lr": 2.0, "clip_gradients": 0.5},
        ),
        ("stages", test_stage_layouts.RECIPE, {"ema_decay": 0.0, "steps": 8}, {}),
    )
}
TRAININGS = {
    "split": Training(test_layouts.Net, 68),
    "stages": Training(test_stage_layouts.Net, 68, 20),
}
HEAD = test_layouts.HEAD
ALONE = {"split": ParallelConfig(split=HEAD, parts=4), "stages": ParallelConfig()}
MODEL_2, SPLIT_4 = ParallelConfig(1, 2, HEAD, 4), ParallelConfig(2, 2, HEAD, 4)
STAGES_2_X_2 = ParallelConfig(2, stages=["middle"])
STAGES_4 = ParallelConfig(stages=["middle", "middle.3", "middle.6"])
ROWS = {"split": SPLIT_4, "stages": STAGES_2_X_2}
"""Two rows of one replica each; a layout of one row hosts both."""

SLOWMO = {"outer": "slowmo", "inner_momentum": "zero"}
BESIDE = {"fragments": 3, "local_steps": 7, "overlap_steps": 1}


@pytest.mark.parametrize(
    ("kind", "parallel", "words"),
    [
        ("split", SPLIT_4, SLOWMO),
        ("split", MODEL_2, {}),
        ("stages", STAGES_2_X_2, {}),
        ("stages", STAGES_4, BESIDE),
    ],
    ids=["split 2 x 2", "split 2", "2 x 2 stages", "4 stages"],
)
def test_any_layout(
    trained: Trained, kind: str, parallel: ParallelConfig, words: dict[str, Any]
) -> None:
    recipe = changed(RECIPES[kind], synchrony=words)
    alone = trained(1, changed(recipe, parallel=ALONE[kind]), TRAININGS[kind])
    workers = max(1, parallel.data) * parallel.row_size
    found = trained(workers, changed(recipe, parallel=parallel), TRAININGS[kind])
    assert end(found) == end(alone)
    assert [row["loss"] for row in found.history] == [row["loss"] for row in alone.history]
    folder = found.folder
    record = read_run_file(folder, "result.json")["synchrony"]
    assert (record["replicas"], record["synchronous_steps"]) == (2, 0)
    if words != BESIDE:
        assert record["averages"] == 3
    waits = [rank.waits_s for rank in explain(folder, in_rounds=True).ranks]
    assert all(("activations" in each) == (kind == "split") for each in waits)


@pytest.mark.parametrize("kind", ["split", pytest.param("stages", marks=pytest.mark.slow)])
def test_a_layout_goes_on_with_an_average_under_way(trained: Trained, kind: str) -> None:
    """The checkpoint has the weights of each replica."""
    recipe = changed(RECIPES[kind], synchrony=BESIDE)
    alone = trained(1, changed(recipe, parallel=ALONE[kind]), TRAININGS[kind])
    rows = changed(recipe, parallel=ROWS[kind])
    on = trained(4, rows, TRAININGS[kind], checkpoint_of(alone, 3))
    other = changed(recipe, parallel=MODEL_2 if kind == "split" else ParallelConfig(2))
    last = trained(2, other, TRAININGS[kind], checkpoint_of(on, 5))
    assert end(last) == end(on) == end(alone)


@pytest.mark.parametrize("kind", ALONE)
def test_a_vote_of_one_rank_is_heard_in_all_columns(trained: Trained, kind: str) -> None:
    """Rank 0 alone looks at the time, and asks for a checkpoint after each average."""
    often = changed(RECIPES[kind], parallel=ROWS[kind], checkpoint=CheckpointConfig(0, 1e-6, 0))
    found = trained(4, often, TRAININGS[kind])
    alone = trained(1, changed(RECIPES[kind], parallel=ALONE[kind]), TRAININGS[kind])
    assert end(found) == end(alone)
    saved = sorted(each.name for each in (found.folder / "checkpoints").glob("step-*"))
    assert saved == ["step-00000003", "step-00000006", "step-00000008"]


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
    """Rank 1 alone finds that its gradients are not finite."""
    finite = GradientReducer.finite

    def found(reducer: GradientReducer) -> Tensor:
        return finite(reducer) & (os.environ["RANK"] != "1")

    with patch.object(GradientReducer, "finite", found):
        return TRAININGS["split"].error(recipe, folder)


def test_a_part_that_is_not_finite_is_told_by_the_whole_row(ranks: Ranks, tmp_path: Path) -> None:
    recipe = changed(RECIPES["split"], parallel=MODEL_2)
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
