"""Parsing of options by jsonargparse, with errors in one line and short help."""

import json
import re
import tomllib
from argparse import Action, HelpFormatter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, Namespace

from firecaffe.cli.line import TypedWords, read_line
from firecaffe.cli.suggest import did_you_mean
from firecaffe.errors import RecipeError
from firecaffe.files import MOST_BYTES, read_bytes

KINDS = {
    "int": "a whole number",
    "float": "a finite number",
    "bool": "true or false",
    "list": "a list",
    "dict": "a table: { NAME = VALUE, … }",
}


class Parser(ArgumentParser):
    """The options of a command. Its errors are RecipeErrors."""

    def __init__(
        self,
        command: str,
        usage: str,
        description: str,
        takes_recipe: bool = False,
        instead: Mapping[str, str] | None = None,
    ) -> None:
        """Make a parser. `instead` has recipe fields without effect on the command, and why."""
        self.own: list[Action] = []
        """The command's options and arguments, without the recipe's fields."""
        super().__init__(
            prog=f"firecaffe {command}",
            usage=f"firecaffe {command} {usage}",
            description=description,
            formatter_class=HelpFormatter,
            parser_mode="toml",
            print_config=None,
            default_env=False,
            allow_abbrev=False,
            add_help=False,
        )
        self.command = command
        self.takes_recipe = takes_recipe
        self.instead = dict(instead or {})
        self._has_recipe = False
        self.add("-h", "--help", action="help", help="show this help message and exit")

    def add(self, *names: Any, group: Any = None, **words: Any) -> None:
        """Add an option like argparse's `add_argument`; its help shows an informative default."""
        default = words.get("default")
        if not isinstance(default, bool) and default not in (None, "", []):
            words["help"] = f"{words.get('help', '')} (default: {default})"
        self.own.append((group or self).add_argument(*names, **words))

    def add_group(self, title: str) -> Callable[..., None]:
        return partial(self.add, group=self.add_argument_group(title))

    def add_recipe(self) -> None:
        """Add --recipe, for a recipe's file, and an option for each of its fields."""
        from firecaffe.recipe.sections import Recipe

        self.add("--recipe", action="config")
        self.add_class_arguments(Recipe)
        self._has_recipe = True

    def read(self, argv: list[str]) -> TypedWords:
        """Split a command line. Raises RecipeError for an unknown option."""
        options = {name: each for each in self.own for name in each.option_strings}
        words = _recipe_words() if self.takes_recipe else ()
        return read_line(f"firecaffe {self.command}", argv, options, words)

    def add_best(self) -> None:
        self.add("--best", action="store_true", help="the best checkpoint, not the newest")

    def add_trust(self) -> None:
        self.add(
            "--trust-code", action="store_true", help="run the code that a run or .fcz file names"
        )

    def add_overwrite(self) -> None:
        self.add("--overwrite", action="store_true", help="replace the output file if it exists")

    def parse_args(self, args: Sequence[str], **more: Any) -> Namespace:  # type: ignore[override]
        line = self.read(list(args))
        if line.words and not self._has_recipe:
            raise RecipeError(f"--{line.words[0]} is a word of a recipe, and no recipe is given")
        defaults = _recipe_words() if self.takes_recipe else {}
        lists = {f"--{word}" for word, value in defaults.items() if isinstance(value, list)}
        return super().parse_args(
            [_with_json(argument, lists) for argument in line.arguments], **more
        )

    def parse_path(self, path: Any, **more: Any) -> Namespace:
        """Parse a recipe's file, in which a path may not be UTF-8."""
        content = read_bytes(str(path), MOST_BYTES).decode(errors="surrogateescape")
        words: Namespace = self.parse_string(content, path=str(path), **more)
        return words

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        named = {each.dest: each.option_strings or [each.dest.upper()] for each in self.own}
        raise RecipeError(one_line(message, named)) from ex


def _recipe_words() -> dict[str, Any]:
    from firecaffe.recipe.identity import flatten
    from firecaffe.recipe.sections import Recipe

    return flatten(Recipe())


BARE = re.compile(r"\[\s*([^\s\[\]{}\"',=]+(?:\s*,\s*[^\s\[\]{}\"',=]+)*)\s*\]")
"""A list of names without quotes, which a shell may have removed."""


def _with_json(argument: str, lists: Collection[str]) -> str:
    """Convert a TOML table or list to JSON: `[features.6]` alone would be the head of a table."""
    option, _, value = argument.partition("=")
    is_list = option in lists and value.startswith("[")
    if not value.startswith("{") and not is_list:
        return argument
    try:
        return f"{option}={json.dumps(tomllib.loads(f'value = {value}')['value'])}"
    except (ValueError, TypeError):  # already JSON, or neither
        bare = BARE.fullmatch(value) if is_list else None
        names = re.split(r"\s*,\s*", bare[1]) if bare else []
        return f"{option}={json.dumps(names)}" if bare else argument


def one_line(message: str, named: Mapping[str, Sequence[str]]) -> str:
    """Shorten a message of jsonargparse; `named` maps option names to their spellings."""
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
        found = f"{unknown[1]}.{unknown[2]}"
        line = f"{found}: there is no such word in a recipe{did_you_mean(found, _recipe_words())}"
    return line
