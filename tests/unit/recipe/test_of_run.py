"""A run's recipe may be anyone's."""

import pytest

from firecaffe.errors import RecipeError
from firecaffe.parallel.config import ParallelConfig
from firecaffe.recipe.recorded_recipe import recipe_from


@pytest.mark.parametrize("name", ["no_such", "__dict__", "__doc__", "__init__"])
def test_what_is_no_section_is_one_line(name: str) -> None:
    with pytest.raises(RecipeError, match=f"{name}: a recipe has no such section"):
        recipe_from({name: {}})


def test_a_run_of_an_earlier_version_has_words_that_are_gone() -> None:
    sections = {"parallel": {"model": 2, "head_updates": 1, "exchange": "at_once"}}
    assert recipe_from(sections).parallel == ParallelConfig(model=2)
    sections["parallel"]["head_updates"] = 2  # it was trained otherwise
    with pytest.raises(RecipeError, match=r"parallel\.head_updates: a recipe has no such word"):
        recipe_from(sections)
