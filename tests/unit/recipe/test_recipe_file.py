"""A recipe in Python is the one of the command line, and a file and back."""

from pathlib import Path
from typing import Any

import pytest

import firecaffe
from firecaffe import Recipe, RecipeError, SolverConfig, TrainConfig
from firecaffe.cli.typed_recipe import read_recipe
from tests.ranks.networks import small_data

ROOT = Path(__file__).parents[3]
FILES = sorted([*ROOT.glob("recipes/*.toml"), *ROOT.glob("examples/**/*.toml")])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_is_read_as_the_command_line_reads_it(path: Path, tmp_path: Path) -> None:
    recipe = Recipe.read(path)
    assert recipe == read_recipe(path)
    recipe.write(tmp_path / "again.toml")
    assert Recipe.read(str(tmp_path / "again.toml")) == recipe


def test_one_word_is_replaced() -> None:
    recipe = Recipe(solver=SolverConfig(base_lr=0.5, momentum=0.8))
    changed = recipe.replace("solver.base_lr", 0.1)
    assert changed.solver == SolverConfig(base_lr=0.1, momentum=0.8)
    assert recipe.solver.base_lr == 0.5


@pytest.mark.parametrize("word", ["solver", "solver.rate", "solvers.base_lr", "replace.x"])
def test_a_word_that_is_none_is_refused(word: str) -> None:
    with pytest.raises(RecipeError, match=word):
        Recipe().replace(word, 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[train]\nstep = 3", ["train.step"]),
        ("[train]\nsteps = 'three'", ["train.steps"]),
        ("[trains]\nsteps = 3", ["trains"]),
        ("train = 3", ["train"]),
        ("[train", ["cannot be read"]),
    ],
)
def test_a_mistake_in_a_file_is_one_line(text: str, words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(RecipeError) as told:
        Recipe.read(path)
    line = str(told.value)
    assert all(word in line for word in [*words, "mine.toml"])
    assert "\n" not in line


def test_a_file_is_trained(tmp_path: Path) -> None:
    train = TrainConfig(8, 4, steps=1, eval_batch_size=30, device="cpu")
    recipe = Recipe(train=train).replace("run.tensorboard", False)
    recipe = recipe.replace("run.folder", str(tmp_path / "run"))
    recipe.write(tmp_path / "mine.toml")
    sets: Any = small_data(16), small_data(30, 1)
    result = firecaffe.train(tmp_path / "mine.toml", model, *sets)
    assert result.steps == 1


def model() -> Any:
    from torch import nn

    return nn.Sequential(nn.Flatten(), nn.Linear(36, 4))
