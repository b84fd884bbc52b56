"""The options of `firecaffe demo`."""

from firecaffe.cli.options.verify import OF_TWINS
from firecaffe.cli.parser import Parser


def make_parser() -> Parser:
    return Parser(
        "demo",
        "RECIPE.toml [--section.word value …]",
        "Train a recipe on one worker and on as many as there are cores (2 to 4), and compare. "
        "Exit code 0 only if both end with the same weights.",
        takes_recipe=True,
        instead=OF_TWINS,
    )
