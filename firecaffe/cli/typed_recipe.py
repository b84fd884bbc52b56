"""A recipe or a run that is a command's argument: its recipe, with the options that were typed."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from jsonargparse import Namespace

from firecaffe.cli.arguments import Parser
from firecaffe.cluster.handover import LAUNCHED
from firecaffe.errors import RecipeError
from firecaffe.files import write_atomically
from firecaffe.recipe.checked_recipe import CheckedRecipe, check_recipe, read_sections
from firecaffe.recipe.idle_settings import EFFECTIVE_IF, idle_settings
from firecaffe.recipe.sections import Recipe, flatten, recipe_path, to_toml
from firecaffe.runs.run_folder import RECIPE


def parse_recipe(parser: Parser, argv: list[str]) -> tuple[CheckedRecipe, Namespace]:
    """Read `RECIPE.toml [options]`; set `options.recipe` to its path. Raises RecipeError."""
    line = parser.read(argv)
    own = "" if line.positionals else _own_recipe(line.options)
    path = recipe_path(parser.only("recipe", line.positionals, own))
    sections = read_sections(path)
    parser.add_recipe()
    options = parser.parse_args(["--recipe", str(path), *line.options])
    built = parser.instantiate(options)
    parts: dict[str, Any] = {name: built[name] for name in Recipe.__dataclass_fields__}
    written, note = _with_length(Recipe(**parts), set(line.words), set(sections.get("train", ())))
    recipe = check_recipe(written)
    _check_typed(parser, recipe, line.words)
    notes = [f"{note} of {path}"] if note else []
    notes += _formula_notes(recipe, set(line.words), sections, path)
    if LAUNCHED not in os.environ and os.environ.get("RANK", "0") == "0":
        for text in notes:
            print(f"note: {text}", file=sys.stderr)
    options.recipe = path
    return recipe, options


def parse_optional_recipe(
    make_parser: Callable[..., Parser], argv: list[str]
) -> tuple[CheckedRecipe | None, Parser, Namespace]:
    """Read `[RECIPE.toml] [options]`; options may stand for the recipe. Raises RecipeError."""
    parser = make_parser()
    if not parser.read(argv).positionals:
        return None, parser, parser.parse_args(argv)
    parser = make_parser(has_recipe=True)
    recipe, options = parse_recipe(parser, argv)
    return recipe, parser, options


@dataclass(frozen=True)
class TypedRun:
    where: Path
    """The run's folder, a checkpoint in it, or a .fcz file."""
    options: Namespace
    others: Sequence[str]
    """The files after the run on the command line."""
    replaced: dict[str, Any]
    """The typed fields of a recipe, with their values."""


def parse_run(
    parser: Parser, argv: list[str], takes_files: bool = False, instead: str = ""
) -> TypedRun:
    """Read `RUN|NET.fcz [FILE…] [--trust-code] [--section.word value …]`.

    `instead` is added to the reason why a setting has no effect, and names the command that takes
    it. Raises RecipeError for a wrong line; RunError for a missing run; CheckpointError for a
    damaged .fcz.
    """
    # Late: a plan, which reads its recipe by this file, needs no module of a training.
    from firecaffe.api.run_argument import TRAINED, USED, folder_of
    from firecaffe.training.fcz_description import described, is_coded, with_nets

    trained = [word for word in flatten(Recipe()) if not word.startswith(USED)]
    parser.instead = dict.fromkeys(trained, TRAINED + instead) | parser.instead
    line = parser.read(argv)
    runs, others = line.positionals, list[str]()
    if takes_files:
        runs, others = runs[:1], runs[1:]
    where = Path(parser.only("run", runs))
    if is_coded(where):
        own, _ = described(where, line.words)
        with TemporaryDirectory() as folder:
            path = Path(folder, RECIPE)
            write_atomically(path, to_toml(with_nets(where, own, line.words)))
            recipe, options = parse_recipe(parser, [str(path), *line.options])
    else:
        recipe, options = parse_recipe(parser, [str(folder_of(where) / RECIPE), *line.options])
    values = flatten(recipe)
    return TypedRun(where, options, others, {word: values[word] for word in line.words})


def _own_recipe(options: list[str]) -> str:
    words = [word for option in options for word in option.split("=", 1)]
    if "--resume" not in words[:-1]:
        return ""
    folder = Path(words[words.index("--resume") + 1])
    recipes = [parent / RECIPE for parent in (folder, *folder.parents)]
    own = next((path for path in recipes if path.is_file()), None)
    return "" if own is None else f" (that of the run to resume is {own})"


LENGTH_WORDS = (("steps", "epochs"), ("epochs", "steps"))


def _with_length(recipe: Recipe, typed: set[str], in_file: set[str]) -> tuple[Recipe, str]:
    """Replace the file's length by a typed one, and return a note on it. Raises RecipeError."""
    for word, other in LENGTH_WORDS:
        value, before = getattr(recipe.train, word), getattr(recipe.train, other)
        if f"train.{word}" not in typed or f"train.{other}" in typed:
            continue
        if not value and not before:
            raise RecipeError(f"train.{word} is 0; it must be at least 1")
        if value and before and other in in_file:
            length = {other: 0, word: value}
            train = replace(recipe.train, steps=length["steps"], epochs=length["epochs"])
            line = f"--train.{word} {value} takes the place of train.{other} {before}"
            return replace(recipe, train=train), line
    return recipe, ""


FORMULA_CHOICES = {
    "solver.lr_policy": ("solver.gamma", "solver.power", "solver.stepsize"),
    "solver.type": ("solver.momentum", "solver.delta"),
}
"""Fields that choose a formula, and the fields whose meaning depends on the choice."""


def _formula_notes(
    recipe: Recipe, typed: set[str], sections: Mapping[str, Mapping[str, Any]], path: Path
) -> list[str]:
    """Return notes on values in the file whose meaning a typed formula has changed."""
    values, default, lines = flatten(recipe), flatten(Recipe()), []
    in_file = {
        f"{name}.{word}": value for name in sections for word, value in sections[name].items()
    }
    for word, others in FORMULA_CHOICES.items():
        before = in_file.get(word, default[word])
        kept = [
            f"{other} {values[other]}"
            for other in others
            if other in in_file.keys() - typed and EFFECTIVE_IF[other].holds(values)
        ]
        if word in typed and values[word] != before and kept:
            lines.append(
                f"--{word} {values[word]} takes {', '.join(kept)}, as {path} has it for {before}; "
                "the typed words count instead"
            )
    return lines


TRAINING_COMMANDS = ("train", "verify", "demo", "tune")
"""Commands that train the recipe. For others, its fields are a description to pick from."""


def _check_typed(parser: Parser, recipe: Recipe, typed: list[str]) -> None:
    idle = idle_settings(recipe) if parser.command in TRAINING_COMMANDS else {}
    for word in typed:
        if word in parser.instead:
            raise RecipeError(f"--{word} has no effect on {parser.command}: {parser.instead[word]}")
        if word in idle:
            raise RecipeError(f"--{idle[word]}")
