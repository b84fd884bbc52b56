"""Recipes by name: the package's are those of the repository."""

from pathlib import Path

import pytest

from firecaffe import Recipe, RecipeError
from firecaffe.recipe.sections import recipe_path, shipped

ROOT = Path(__file__).parents[3]


def test_those_of_the_package_are_those_of_the_repository() -> None:
    assert shipped() == sorted(path.stem for path in ROOT.glob("recipes/*.toml"))
    assert Recipe.read("nin_small") == Recipe.read(ROOT / "recipes" / "nin_small.toml")


def test_a_path_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("nin_small.toml", "mine/nin_small", "/nin_small"):
        assert recipe_path(name) == Path(name)
    (tmp_path / "nin_small").write_text("[train]\nsteps = 3\n")
    assert Recipe.read("nin_small").train.steps == 3  # what lies here is meant


def test_a_name_that_is_none_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(RecipeError, match=r"'nin_smal'.*nin_small"):
        Recipe.read("nin_smal")
