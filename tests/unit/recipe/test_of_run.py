"""A run's recipe may be anyone's."""

import pytest

from firecaffe.errors import RecipeError
from firecaffe.recipe.of_run import recipe_from


@pytest.mark.parametrize("name", ["no_such", "__dict__", "__doc__", "__init__"])
def test_what_is_no_section_is_one_line(name: str) -> None:
    with pytest.raises(RecipeError, match=f"{name}: a recipe has no such section"):
        recipe_from({name: {}})
