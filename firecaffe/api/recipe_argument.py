"""The recipe that a function is given: a Recipe, or the path of its file."""

from pathlib import Path
from typing import Any

from firecaffe.errors import RecipeError
from firecaffe.recipe.checked_recipe import CheckedRecipe, check_recipe
from firecaffe.recipe.sections import Recipe
from firecaffe.user_code import shown


def recipe_of(recipe: Any) -> CheckedRecipe:
    """Read a recipe if it is a path, and check it. Raises: RecipeError."""
    if isinstance(recipe, str | Path):
        recipe = Recipe.read(recipe)
    if not isinstance(recipe, Recipe):
        raise RecipeError(
            f"recipe is {shown(recipe)}; expected a firecaffe.Recipe, or the path of a recipe's "
            "file"
        )
    return check_recipe(recipe)
