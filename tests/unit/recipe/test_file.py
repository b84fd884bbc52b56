"""Recipes as files: written, read again and typed over; and those that come along."""

import dataclasses
import inspect
import re
import tomllib
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from torch import nn

import firecaffe
from firecaffe import ParallelConfig, Recipe, RecipeError, SolverConfig
from firecaffe.cli.train import make_parser
from firecaffe.cli.typed_recipe import parse_recipe
from firecaffe.models import build_model
from firecaffe.planner.cluster import load_cluster
from firecaffe.planner.forecast import forecast
from firecaffe.planner.recipe_workload import workload_of
from firecaffe.recipe.checked_recipe import check_recipe, recipe_from
from firecaffe.recipe.idle_settings import idle_settings
from firecaffe.recipe.sections import flatten, recipe_path, shipped, to_toml
from firecaffe.solvers.optimizer import groups_of
from firecaffe.solvers.rate_policy import learning_rate
from tests.kit.models_pages import ROOT
from tests.kit.models_refused import refused
from tests.kit.training import recipe_in
from tests.kit.training_fixtures import Capture, Patch
from tests.ranks.networks import small_data
from tests.unit.recipe.other import APART, OTHER

FILES = sorted([*ROOT.glob("recipes/*.toml"), *ROOT.glob("examples/**/*.toml")])
SECTIONS = get_type_hints(Recipe)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "mine.toml"


def parsed(path: Path, text: str, *options: str) -> Recipe:
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    return parse_recipe(make_parser(), [str(path), *options])[0]


def test_the_example_changes_every_word() -> None:
    default, other = flatten(Recipe()), flatten(OTHER)
    assert default.keys() == other.keys()
    # The length beside which there is no other; and what a compressor goes with alone, or not
    # (see test_identity.py); nor the order that nothing can be held out beside.
    assert [name for name in default if default[name] == other[name]] == [
        *("data.order", "train.epochs", "exchange.update_at", "synchrony.mode", "synchrony.shares"),
        *APART,
    ]


@pytest.mark.parametrize("recipe", [Recipe(), OTHER], ids=["default", "other"])
def test_a_recipe_is_its_file(path: Path, recipe: Recipe) -> None:
    """Every word is written, and is read with its type."""
    read = parsed(path, to_toml(recipe))
    assert (read, flatten(read)) == (recipe, flatten(recipe))
    assert list(map(type, flatten(read).values())) == list(map(type, flatten(recipe).values()))
    written = tomllib.loads(to_toml(recipe))
    assert {f"{s}.{w}" for s, words in written.items() for w in words} == set(flatten(recipe))


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_a_file_is_read_as_the_command_line_reads_it(file: Path) -> None:
    assert Recipe.read(file) == parse_recipe(make_parser(), [str(file)])[0]


def test_a_file_is_written_over_only_if_that_is_asked(path: Path) -> None:
    OTHER.write(path)
    with pytest.raises(RecipeError, match="overwrite"):
        Recipe().write(path)
    assert Recipe.read(str(path)) == OTHER
    Recipe().write(path, overwrite=True)
    assert Recipe.read(path) == Recipe()


def test_a_word_of_the_command_line_wins(path: Path) -> None:
    text = "[train]\nsteps = 5\nseed = 3\n"
    recipe = parsed(path, text, "--train.steps", "8", "--solver.base_lr", "0.2")
    assert (recipe.train.steps, recipe.train.seed, recipe.solver.base_lr) == (8, 3, 0.2)


def test_one_word_is_replaced() -> None:
    recipe = Recipe(solver=SolverConfig(base_lr=0.5, momentum=0.8))
    assert recipe.replace("solver.base_lr", 0.1).solver == SolverConfig(base_lr=0.1, momentum=0.8)
    assert recipe.solver.base_lr == 0.5
    for word in ("solver", "solver.rate", "solvers.base_lr", "replace.x"):
        with pytest.raises(RecipeError, match=word):
            Recipe().replace(word, 1)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        *(("[train]\nstep = 3", "train.step"), ("[train]\nsteps = 'three'", "train.steps")),
        *(("[trains]\nsteps = 3", "trains"), ("train = 3", "train"), ("[train", "cannot be read")),
    ],
)
def test_a_mistake_in_a_file_is_one_line(text: str, named: str, path: Path) -> None:
    path.write_text(text)
    with refused(RecipeError, ["mine.toml", named]):
        Recipe.read(path)


@pytest.mark.parametrize(
    ("text", "options", "named"),
    [
        ("global_batch_siz = 4", [], "did you mean train.global_batch_size?"),
        # Who looks for gradient accumulation is told of micro-batches.
        ("accumulate_grad_batches = 4", [], "train.micro_batch_size"),
        ("", ["--train.gradient-accumulation-steps", "4"], "train.micro_batch_size"),
        ("steps = 5\nepochs = 1", [], "train.steps = 5 with train.epochs = 1"),
        ("", ["--train.steps=5", "--train.epochs=1"], "train.steps = 5 with train.epochs = 1"),
        ("steps = 5", ["--train.steps=6", "--train.epochs=1"], "train.steps = 6 with train.ep"),
        ("seed = 1", ["--train.epochs", "0"], "train.epochs is 0"),
    ],
)
def test_a_typed_mistake_is_one_line(text: str, options: list[str], named: str, path: Path) -> None:
    with refused(RecipeError, [named]):
        parsed(path, f"[train]\n{text}\n", *options)


@pytest.mark.parametrize(("word", "other"), [("steps", "epochs"), ("epochs", "steps")])
def test_a_typed_length_takes_the_place_of_the_file_s(
    path: Path, capsys: Capture, word: str, other: str
) -> None:
    text = f"[train]\n{other} = 70\n"
    train = parsed(path, text, f"--train.{word}", "5").train
    assert (getattr(train, word), getattr(train, other)) == (5, 0)
    (line,) = capsys.readouterr().err.splitlines()
    assert all(part in line for part in (f"train.{word} 5", f"train.{other} 70", str(path)))
    assert getattr(parsed(path, text, f"--train.{word}", "0").train, other) == 70
    assert getattr(parsed(path, text, f"--train.{other}", "6").train, other) == 6
    assert capsys.readouterr().err == ""
    assert parsed(path, "").train.num_steps(7) == 7  # no length is one epoch


def test_a_file_is_trained(path: Path) -> None:
    words = "train.global_batch_size=8 train.micro_batch_size=4 train.steps=1"
    recipe_in(path.with_name("run"), words).write(path)
    sets: Any = small_data(16), small_data(30, 1)
    result = firecaffe.train(path, lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 4)), *sets)
    assert result.steps == 1


@pytest.mark.parametrize("section", SECTIONS)
def test_every_word_is_explained(section: str) -> None:
    kind = SECTIONS[section]
    explained = re.findall(r"^    (\w+): \S", inspect.getdoc(kind) or "", re.M)
    assert explained == [field.name for field in dataclasses.fields(kind)]


@pytest.mark.parametrize("name", ["no_such", "__dict__", "__doc__", "__init__"])
def test_what_a_run_names_that_is_no_section_is_one_line(name: str) -> None:
    with pytest.raises(RecipeError, match=f"{name}: a recipe has no such section"):
        recipe_from({name: {}})


def test_a_run_of_an_earlier_version_has_words_that_are_gone() -> None:
    sections = {"parallel": {"model": 2, "head_updates": 1, "exchange": "at_once"}}
    assert recipe_from(sections).parallel == ParallelConfig(model=2)
    sections["parallel"]["head_updates"] = 2  # it was trained otherwise
    with pytest.raises(RecipeError, match=r"parallel\.head_updates: a recipe has no such word"):
        recipe_from(sections)


IMAGES = 1_200_000
"""Of an epoch, as the paper counts them."""

EPOCHS = {
    "nin_imagenet_b256": 46.9,
    "nin_imagenet_b1024": 46.9,
    "googlenet_imagenet_b32": 64.0,
    "googlenet_imagenet_b1024": 64.0,
    "alexnet_imagenet_b256": 96.0,
}
OTHERS = [*ROOT.glob("benchmarks/recipes/*.toml"), ROOT / "examples" / "photos" / "photos.toml"]


def test_names_are_those_of_the_package_unless_a_path_is_meant(
    tmp_path: Path, monkeypatch: Patch
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
def test_it_fits_and_is_planned(name: str, tmp_path: Path, monkeypatch: Patch) -> None:
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
