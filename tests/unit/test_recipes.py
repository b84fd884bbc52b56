"""Every recipe that comes along loads, fits its network, is planned, and has its page."""

import re
from pathlib import Path

import pytest
import torch

from firecaffe.cli.typed_recipe import read_recipe
from firecaffe.models import build_model
from firecaffe.plan.cluster import load_cluster
from firecaffe.plan.forecast import forecast
from firecaffe.plan.of_recipe import workload_of
from firecaffe.recipe.checked_recipe import check_recipe
from firecaffe.recipe.sections import Recipe
from firecaffe.solvers.optimizer import groups_of
from firecaffe.solvers.rate_policy import learning_rate

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))
PAGES = ROOT / "docs" / "recipes"
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


def test_every_recipe_has_its_page() -> None:
    names = {path.stem for path in RECIPES}
    assert {path.stem for path in PAGES.glob("*.md")} == {*names, "README"}
    index = (PAGES / "README.md").read_text()
    assert set(re.findall(r"^\| \[(\w+)\]\(\1\.md\)", index, re.M)) == names


@pytest.mark.parametrize("name", EPOCHS)
def test_a_pages_forecasts_are_the_planners(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT / "tests")
    work = workload_of(check_recipe(load(ROOT / "recipes" / f"{name}.toml")))
    rows = re.findall(r"^\| ([\w-]+) \| (\d+) \| (\w+|-) \| .*h \|$", _page(name), re.M)
    assert len(rows) == 6
    for cluster, workers, exchange in rows:
        algorithm = "tree" if exchange == "-" else exchange
        row = forecast(work, load_cluster(cluster), int(workers), algorithm)
        assert row.hours is not None
        line = (
            f"| {cluster} | {workers} | {exchange} | {1e3 * row.step_s:,.0f} ms "
            f"| {row.images_per_s:,.0f} | {row.speedup:.1f} | {row.efficiency:.0%} "
            f"| {row.hours:,.1f} h |"
        )
        assert line in _page(name)


def _page(name: str) -> str:
    return (PAGES / f"{name}.md").read_text()
