"""The `recipe` argument of a function: a Recipe, the path of its file, or only a network's name."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from firecaffe.errors import RecipeError
from firecaffe.models import MODELS, ModelConfig
from firecaffe.planner.workload import input_of
from firecaffe.recipe.checked_recipe import CheckedRecipe, check_recipe
from firecaffe.recipe.sections import Recipe, TrainConfig
from firecaffe.resume_advice import option
from firecaffe.user_code import is_caffe, shown
from firecaffe.value_checks import check_section_types


def recipe_of(recipe: Any) -> CheckedRecipe:
    """Read a recipe if it is the path of its file, and check it. Raises: RecipeError."""
    if isinstance(recipe, str | Path):
        recipe = Recipe.read(recipe)
    if not isinstance(recipe, Recipe):
        raise RecipeError(
            f"recipe is {shown(recipe)}; expected a firecaffe.Recipe, or the path of a recipe's "
            "file"
        )
    return check_recipe(recipe)


MAX_PIXELS = 65_536


def network_of(
    model: str, args: Mapping[str, Any], input: str
) -> tuple[ModelConfig, tuple[int, int, int] | None]:
    """Return the network, and the shape of its images if one is given. Raises RecipeError."""
    if not isinstance(args, Mapping):
        raise RecipeError(f"{option('args')} is {shown(args)}; expected words with their values")
    config = ModelConfig(model, dict(args))
    check_section_types("model", config)
    shape = parse_input(input, option("input")) if input else None
    if shape and is_caffe(config.name):
        config = replace(config, args={"input_CHW": list(shape), **config.args})
    return config, shape


def parse_input(text: str, word: str) -> tuple[int, int, int]:
    """Parse CxHxW (channels, rows, columns), typed after `word`. Raises RecipeError."""
    try:
        channels, rows, columns = (int(part) for part in text.split("x"))
    except (ValueError, AttributeError, TypeError):  # the last two: no text
        channels = rows = columns = 0
    if min(channels, rows, columns) < 1 or max(channels, rows, columns) > MAX_PIXELS:
        raise RecipeError(
            f"{word} is {text!r}; it must be channels x rows x columns, as 3x224x224, each 1 to "
            f"{MAX_PIXELS:,}"
        )
    return channels, rows, columns


def recipe_for(
    config: ModelConfig, input_CHW: tuple[int, int, int] | None, device: str = "auto"
) -> CheckedRecipe:
    """Make a recipe for images that need not exist. Raises RecipeError if no data set fits."""
    shape = input_CHW or input_of(config)
    channels, side, columns = shape
    is_imagenet = config.name not in MODELS or MODELS[config.name].num_classes == 1000
    data: dict[str, Any] = {"name": "folder", "resize": side, "crop": side}
    if shape == (1, 28, 28):
        data = {"name": "generated"}
    elif shape == (3, 32, 32) and not is_imagenet:
        data = {"name": "cifar10"}
    elif channels != 3 or side != columns:
        by = "x".join(map(str, shape))
        raise RecipeError(
            f"{option('input')} is {by}; without a recipe it must be 1x28x28 or 3xSxS"
        )
    recipe = Recipe(model=config)
    train = TrainConfig(device=device)  # type: ignore[arg-type]
    return check_recipe(replace(recipe, data=replace(recipe.data, **data), train=train))
