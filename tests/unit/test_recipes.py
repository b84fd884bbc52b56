"""Every recipe that comes along loads, fits its network, and is planned."""

from pathlib import Path

import pytest
import torch

from firecaffe.cli.typed_recipe import read_recipe
from firecaffe.models import build_model
from firecaffe.planner.cluster import load_cluster
from firecaffe.planner.forecast import forecast
from firecaffe.planner.of_recipe import workload_of
from firecaffe.recipe.checked_recipe import check_recipe
from firecaffe.recipe.sections import Recipe
from firecaffe.solvers.optimizer import groups_of
from firecaffe.solvers.rate_policy import learning_rate

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))
IMAGES = 1_200_000
"""Of an epoch, as the paper counts them."""

EPOCHS = {
    "nin_imagenet_b256": 46.9,
    "nin_imagenet_b1024": 46.9,
    "googlenet_imagenet_b32": 64.0,
    "googlenet_imagenet_b1024": 64.0,
    "alexnet_imagenet_b256": 96.0,
}


def load(path: Path) -> Recipe:
    recipe = read_recipe(path)
    check_recipe(recipe)
    return recipe


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_it_loads_and_is_planned(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT / "tests")  # where there are no data
    recipe = load(path)
    work = workload_of(check_recipe(recipe))
    with torch.device("meta"):
        model = build_model(recipe.model.name, work.num_classes, work.layout.channels)
    groups_of(dict(model.named_parameters()), recipe.solver)
    cluster = load_cluster("ethernet-10g")
    most = recipe.train.num_micro_batches
    alone = forecast(work, cluster, 1, "tree")
    many = forecast(work, cluster, most, "halving_doubling")
    assert many.fits
    assert many.compute_s < alone.compute_s
    for step in (0, work.steps - 1):
        assert learning_rate(recipe.solver, step, work.steps) > 0


@pytest.mark.parametrize("name", EPOCHS)
def test_the_papers_epochs_and_rates(name: str) -> None:
    recipe = load(ROOT / "recipes" / f"{name}.toml")
    assert recipe.train.steps * recipe.train.global_batch_size / IMAGES == pytest.approx(
        EPOCHS[name], rel=0.002
    )
    pixel = recipe.data.mean[0] / recipe.data.std[0]
    assert pixel == pytest.approx(123, abs=0.01)  # red first


def test_a_larger_batch_drops_its_rate_at_the_same_epochs() -> None:
    small, large = (load(ROOT / "recipes" / f"nin_imagenet_{b}.toml") for b in ("b256", "b1024"))
    for part in (0.1, 0.44, 0.46, 0.9, 0.92):
        rates = [
            learning_rate(each.solver, int(part * each.train.steps), each.train.steps)
            for each in (small, large)
        ]
        assert rates[1] == pytest.approx(4 * rates[0])
