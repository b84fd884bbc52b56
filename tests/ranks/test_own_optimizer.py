"""A user's own optimizer by name: the same bits on any number of workers, and if it is resumed."""

import dataclasses
from pathlib import Path

import firecaffe
from firecaffe import CheckpointConfig, DataConfig, Recipe, RunConfig, SolverConfig, TrainConfig
from firecaffe.models.config import ModelConfig
from firecaffe.recipe.checked_recipe import check_recipe
from firecaffe.runs.run_folder import read_run_file
from firecaffe.training.checks import preflight
from tests.unit.solvers.own_optimizers import PLACE
from tests.world import Ranks

RECIPE = Recipe(
    model=ModelConfig("lenet"),
    data=DataConfig(name="generated"),
    train=TrainConfig(global_batch_size=12, micro_batch_size=4, steps=3, device="cpu"),
    solver=SolverConfig(
        type=f"{PLACE}:Signs",
        args={"beta": 0.9},
        base_lr=0.01,
        lr_policy="step",
        gamma=0.5,
        stepsize=2,
    ),
    checkpoint=CheckpointConfig(every=2),
)


def fit(recipe: Recipe, folder: str, resume: str | None = None) -> firecaffe.Result:
    recipe = dataclasses.replace(recipe, run=RunConfig(folder=folder, tensorboard=False))
    return firecaffe.train(recipe, resume=resume)


def test_an_own_optimizer_ends_in_the_same_bits(ranks: Ranks, tmp_path: Path) -> None:
    preflight(check_recipe(RECIPE), 3)
    found = {w: ranks.shared(w, fit, RECIPE, str(tmp_path / str(w))) for w in (1, 2, 3)}
    [digest] = {each.state_sha256 for results in found.values() for each in results}
    assert set(read_run_file(tmp_path / "2", "environment.json")["own_code"]) == {"solver"}

    after_2, _ = sorted((tmp_path / "1" / "checkpoints").glob("step-*"))
    resumed = ranks.shared(2, fit, RECIPE, str(tmp_path / "resumed"), str(after_2))
    assert {each.state_sha256 for each in resumed} == {digest}
