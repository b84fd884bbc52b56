"""The recipe of a run that is a command's argument, with the options of the command line."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from jsonargparse import Namespace

from firecaffe.api.run_argument import TRAINED, USED, folder_of
from firecaffe.cli.arguments import Parser
from firecaffe.cli.typed_recipe import parse_recipe
from firecaffe.files import write_atomically
from firecaffe.recipe.identity import flatten, to_toml
from firecaffe.recipe.sections import Recipe
from firecaffe.runs.run_folder import RECIPE
from firecaffe.training.fcz_description import described, is_coded, with_nets


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
