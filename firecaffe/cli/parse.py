"""Recipes and options from the command line, by jsonargparse, with errors in one line."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, Namespace

from firecaffe.errors import RecipeError
from firecaffe.recipe import Recipe, check_recipe
from firecaffe.runs.files import read_small

KINDS = {
    "int": "a whole number",
    "float": "a finite number",
    "bool": "true or false",
    "list": "a list",
    "dict": "a table: { NAME = VALUE, … }",
}
"""For people."""


class Parser(ArgumentParser):
    """A parser whose errors are RecipeErrors."""

    def __init__(self, command: str, usage: str, description: str) -> None:
        super().__init__(
            prog=f"firecaffe {command}",
            usage=f"firecaffe {command} {usage}",
            description=description,
            parser_mode="toml",
            print_config=None,
            default_env=False,
        )

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        named = {
            each.dest: each.option_strings or [each.dest.upper()]
            for each in self._actions
            if "." not in each.dest  # a recipe's word may come from its file
        }
        raise RecipeError(_one_line(message, named)) from ex


def recipe_parser(command: str, usage: str, description: str) -> Parser:
    """A parser of every word of a recipe, after a recipe file."""
    parser = Parser(command, usage, description)
    parser.add_argument("--recipe", action="config", help="the recipe file, in TOML")
    parser.add_class_arguments(Recipe)
    return parser


def recipe_path(argv: list[str]) -> Path:
    """Of a command line that has been parsed: the recipe's file."""
    return Path(argv[argv.index("--recipe") + 1] if "--recipe" in argv else argv[0])


def parse_recipe(parser: Parser, argv: list[str]) -> tuple[Recipe, Namespace]:
    """The recipe and the other options of `RECIPE.toml [options]`.

    Raises: RecipeError in one line, with the word that is wrong.
    """
    if "--recipe" in argv[:-1]:
        place = argv.index("--recipe")
        argv = [argv[place + 1], *argv[:place], *argv[place + 2 :]]
    if argv and not argv[0].startswith("-"):
        path = Path(argv[0])
        try:
            sections = tomllib.loads(read_small(path))
        except OSError as error:
            raise RecipeError(f"recipe {path}: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise RecipeError(f"recipe {path}: is no TOML ({error})") from error
        _check_sections(path, sections)
        argv = ["--recipe", *argv]
    elif not set(argv) & {"-h", "--help"}:
        raise RecipeError(f"no recipe given first; usage: {parser.usage}")
    options = parser.parse_args(argv)
    built = parser.instantiate(options)
    words: dict[str, Any] = {name: built[name] for name in Recipe.__dataclass_fields__}
    recipe = Recipe(**words)
    check_recipe(recipe)
    return recipe, options


def _check_sections(path: Path, sections: dict[str, Any]) -> None:
    """Raises: RecipeError where a section has another name, or is no section."""
    known = tuple(Recipe.__dataclass_fields__)
    for name, value in sections.items():
        if name not in known:
            raise RecipeError(f"recipe {path}: no section {name!r}; there are {', '.join(known)}")
        if not isinstance(value, dict):
            raise RecipeError(
                f"recipe {path}: {name} is {value!r}; it is a section, with words of its own "
                f"([{name}], then a word on each line)"
            )


def _one_line(message: str, named: Mapping[str, Sequence[str]]) -> str:
    """jsonargparse's words, shortened to: the word, what was found, what would be right.

    named: how each option is given, by its name in the program.
    """
    line = re.sub(r"<class '(\w+)'>", r"\1", " ".join(message.split()))
    wrong = re.match(r'Parser key "([\w.]+)": (.*)', line)
    if wrong:
        line = f"{wrong[1]}: {wrong[2]}"
    section = re.match(r"(\w+): Unable to load config '(.*?)'", line)
    if section:
        return f"{section[1]} is {section[2]!r}; it is a section: --{section[1]}.WORD VALUE"
    value = re.match(r"([\w.]+): Expected a (.*?)\. Got value: (.*)", line)
    if value:
        word = max(named.get(value[1], [value[1]]), key=len)
        choice = re.sub(r"typing\.Literal\[(.*)\]", r"one of \1", value[2])
        return f"{word} is {value[3]}; it must be {KINDS.get(value[2], choice)}"
    unknown = re.match(r"Group '([\w.]+)' does not accept option '([\w.]+)'", line)
    if unknown:
        line = f"{unknown[1]}.{unknown[2]}: there is no such word in a recipe"
    return line
