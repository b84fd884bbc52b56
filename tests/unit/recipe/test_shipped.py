"""Recipes that come along: by name, each fits its network, is planned, and has no idle word."""

from pathlib import Path

import pytest
import torch

from firecaffe import Recipe, RecipeError
from firecaffe.models import build_model
from firecaffe.planner.cluster import load_cluster
from firecaffe.planner.forecast import forecast
from firecaffe.planner.recipe_workload import workload_of
from firecaffe.recipe.checked_recipe import check_recipe
from firecaffe.recipe.idle_settings import idle_settings
from firecaffe.recipe.sections import recipe_path, shipped
from firecaffe.solvers.optimizer import groups_of
from firecaffe.solvers.rate_policy import learning_rate
from tests.kit.models_pages import ROOT

IMAGES = 1_200_000
"""Of an epoch, as the paper counts them."""

EPOCHS = {
    "nin_imagenet_b256": 46.9,
    "nin_imagenet_b1024": 46.9,
    "googlenet_imagenet_b32": 64.0,
    "googlenet_imagenet_b1024": 64.0,
    "alexnet_imagenet_b256": 96.0,
}
OTHERS = [
    *(ROOT / "benchmarks" / "recipes").glob("*.toml"),
    ROOT / "examples" / "photos" / "photos.toml",
]


def test_names_are_those_of_the_package_unless_a_path_is_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shipped() == sorted(path.stem for path in ROOT.glob("recipes/*.toml"))
    assert Recipe.read("nin_small") == Recipe.read(ROOT / "recipes" / "nin_small.toml")
    with pytest.raises(RecipeError, match=r"'nin_smal'.*nin_small"):
        Recipe.read("nin_smal")
    monkeypatch.chdir(tmp_path)
    for name in ("nin_small.toml", "mine/nin_small", "/nin_small"):
        assert recipe_path(name) == Path(name)
    (tmp_path / "nin_small").write_text("[train]\nsteps = 3\n")
    assert Recipe.read("nin_small").train.steps == 3  # what lies here is meant


@pytest.mark.parametrize("name", shipped())
def test_it_fits_and_is_planned(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where there are no data
    recipe = check_recipe(Recipe.read(name))
    assert idle_settings(recipe) == {}
    work = workload_of(recipe)
    with torch.device("meta"):
        model = build_model(recipe.model.name, work.num_classes, work.layout.channels)
    groups_of(dict(model.named_parameters()), recipe.solver)
    cluster = load_cluster("ethernet-10g")
    alone = forecast(work, cluster, 1, "tree")
    many = forecast(work, cluster, recipe.train.num_micro_batches, "halving_doubling")
    assert many.fits
    assert many.compute_s < alone.compute_s
    for step in (0, work.steps - 1):
        assert learning_rate(recipe.solver, step, work.steps) > 0


def test_no_word_of_the_benchmarks_or_examples_is_idle() -> None:
    assert {path.stem: idle for path in OTHERS if (idle := idle_settings(Recipe.read(path)))} == {}


@pytest.mark.parametrize("name", EPOCHS)
def test_the_papers_epochs_and_rates(name: str) -> None:
    recipe = Recipe.read(name)
    epochs = recipe.train.steps * recipe.train.global_batch_size / IMAGES
    assert epochs == pytest.approx(EPOCHS[name], rel=0.002)
    assert recipe.data.mean[0] / recipe.data.std[0] == pytest.approx(123, abs=0.01)  # red first


def test_a_larger_batch_drops_its_rate_at_the_same_epochs() -> None:
    small, large = (Recipe.read(f"nin_imagenet_{batch}") for batch in ("b256", "b1024"))
    for part in (0.1, 0.44, 0.46, 0.9, 0.92):
        rates = [
            learning_rate(recipe.solver, int(part * recipe.train.steps), recipe.train.steps)
            for recipe in (small, large)
        ]
        assert rates[1] == pytest.approx(4 * rates[0])
