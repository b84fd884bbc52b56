"""A recipe from its file and the command line."""

import tomllib
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from firecaffe.cli.parser import Parser
from firecaffe.errors import RecipeError
from firecaffe.recipe import Recipe, check_recipe
from firecaffe.runs.files import read_small


def parse_recipe(parser: Parser, argv: list[str]) -> tuple[Recipe, Namespace]:
    """The recipe and the other options of `RECIPE.toml [options]`, in any order. `options.recipe`
    is the recipe's path.

    Raises: RecipeError in one line, with the word that is wrong.
    """
    line = parser.read(argv)
    if len(line.positionals) != 1:
        found = f"{' and '.join(line.positionals)}" or "none"
        raise RecipeError(f"{parser.command} takes one recipe, found {found}; {_usage(parser)}")
    path = Path(line.positionals[0])
    _load(path)
    parser.add_argument("--recipe", action="config")
    parser.add_class_arguments(Recipe)
    options = parser.parse_args(["--recipe", str(path), *line.options])
    built = parser.instantiate(options)
    words: dict[str, Any] = {name: built[name] for name in Recipe.__dataclass_fields__}
    recipe = Recipe(**words)
    check_recipe(recipe)
    options.recipe = path
    return recipe, options


def read_recipe(path: Path) -> Recipe:
    """The recipe of a file. Raises: RecipeError in one line, with the word that is wrong."""
    return parse_recipe(Parser("train", "RECIPE.toml", "", takes_recipe=True), [str(path)])[0]


def _usage(parser: Parser) -> str:
    return f"usage: {parser.usage}"


def _load(path: Path) -> dict[str, dict[str, Any]]:
    """The words of a recipe's file, by section. Raises: RecipeError where it is none."""
    try:
        sections = tomllib.loads(read_small(path))
    except OSError as error:
        raise RecipeError(f"recipe {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"recipe {path}: is no TOML ({error})") from error
    known = tuple(Recipe.__dataclass_fields__)
    for name, value in sections.items():
        if name not in known:
            raise RecipeError(f"recipe {path}: no section {name!r}; there are {', '.join(known)}")
        if not isinstance(value, dict):
            raise RecipeError(
                f"recipe {path}: {name} is {value!r}; it is a section, with words of its own "
                f"([{name}], then a word on each line)"
            )
    return sections
