"""The recipe of a run that a command is given, with the words that stand on its command line."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jsonargparse import Namespace

from firecaffe.cli.parse import parse_recipe
from firecaffe.cli.parser import Parser
from firecaffe.errors import RecipeError, RunError
from firecaffe.recipe.identity import flatten
from firecaffe.recipe.of_run import RECIPE
from firecaffe.recipe.sections import Recipe
from firecaffe.training.load import run_of

USED = ("data.", "task.", "model.name", "model.args", "train.device", "train.eval_batch_size")
"""Beginnings of the words that say how a trained network is used."""

TRAINED = "the run is trained already"


@dataclass(frozen=True)
class OfRun:
    """A command line about a run."""

    where: Path
    """The run's folder, or a checkpoint in it."""
    recipe: Recipe
    options: Namespace
    others: Sequence[str]
    """What was typed beside the run: files."""
    words: Sequence[str]
    """The words of the recipe that were typed."""


def parse_run(parser: Parser, argv: list[str], takes_files: bool = False) -> OfRun:
    """Reads `RUN [FILE…] [--section.word value …]`.

    Raises: RecipeError for what is typed wrongly; RunError if there is no such run.
    """
    parser.instead |= {word: TRAINED for word in flatten(Recipe()) if not word.startswith(USED)}
    line = parser.read(argv)
    if not line.positionals or (len(line.positionals) > 1 and not takes_files):
        found = " and ".join(line.positionals) or "none"
        raise RecipeError(f"{parser.command} takes one run, found {found}; usage: {parser.usage}")
    where, *others = line.positionals
    folder = run_of(Path(where))
    if folder is None:
        what = f"no {RECIPE}; this is no run folder" if Path(where).exists() else "there is no run"
        raise RunError(f"{where}: {what}")
    recipe, options = parse_recipe(parser, [str(folder / RECIPE), *line.options])
    return OfRun(Path(where), recipe, options, others, line.words)
