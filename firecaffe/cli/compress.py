"""`firecaffe compress RUN`: a trained network made small, in one file."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from jsonargparse import Namespace

from firecaffe.cli.compress_plot import plot_sizes
from firecaffe.cli.compress_report import not_reached, report, sensitivity_charts
from firecaffe.cli.console import make_console
from firecaffe.cli.launched import check_alone
from firecaffe.cli.of_run import parse_run
from firecaffe.cli.options.compress import make_parser
from firecaffe.cli.parse import parse_recipe
from firecaffe.cli.picture import SUFFIXES, check_picture
from firecaffe.cli.written import check_target
from firecaffe.cluster.world import join
from firecaffe.errors import NotKeptError, RecipeError
from firecaffe.files import finite, write_json
from firecaffe.recipe.sections import Recipe
from firecaffe.runs.measure import Measure
from firecaffe.shrink.compress import CompressRequest, compress
from firecaffe.shrink.layers import LayerSensitivity
from firecaffe.shrink.record import as_record
from firecaffe.shrink.scheme import find_scheme
from firecaffe.shrink.source import check_weights, recipe_of_run
from firecaffe.shrink.target import parse_target
from firecaffe.training.load import run_of
from firecaffe.training.named import check_named

SUFFIX = ".fcz"


def main(argv: list[str]) -> int:
    check_alone("compress")
    recipe, options, out = _read(argv)
    if options.nproc_per_node < 1:
        raise RecipeError(f"--nproc-per-node is {options.nproc_per_node}; it must be at least 1")
    check_target("--out", str(out), options.overwrite, (SUFFIX,))
    record_to = out.with_suffix(".json")
    is_ours = options.overwrite and out.exists()  # else it is the record of something else
    check_target(f"--out {out} with the record", str(record_to), is_ours)
    check_picture("--plot", options.plot, options.overwrite, SUFFIXES)
    asked = CompressRequest(
        recipe,
        find_scheme(options.scheme),
        parse_target(options.target) if options.target else None,
        out,
        options.nproc_per_node,
    )

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    def say_layers(layers: Sequence[LayerSensitivity], measure: Measure) -> None:
        console = make_console(stderr=True)
        for chart in sensitivity_charts(layers, measure):
            console.print(chart)

    with join(recipe.train.device) as world:
        found = compress(asked, world, say, say_layers)
    record = as_record(found)
    if found.reached:
        write_json(record_to, record)
    if options.plot:
        plot_sizes(Path(options.plot), record)
    if options.json:
        print(json.dumps(finite(record), indent=2))
    else:
        console = make_console()
        for each in report(record):
            console.print(each, markup=False)
    if not found.reached:
        raise NotKeptError(not_reached(record))
    return 0


def _read(argv: list[str]) -> tuple[Recipe, Namespace, Path]:
    """The recipe with its trained weights, the options, and where the file goes.

    Raises: RecipeError, RunError.
    """
    parser = make_parser()
    positionals = parser.read(argv).positionals
    if len(positionals) == 1 and positionals[0].endswith(".toml"):
        recipe, options = parse_recipe(parser, argv)
        check_weights(recipe, options.recipe)
        return recipe, options, Path(options.out or options.recipe.with_suffix(SUFFIX).name)
    typed = parse_run(parser, argv)
    check_named(typed.where, typed.recipe, ("model", "data", "task"))
    of_run = recipe_of_run(typed.where, typed.recipe, typed.options.best)
    folder = run_of(typed.where) or typed.where
    return of_run, typed.options, Path(typed.options.out or folder / f"model{SUFFIX}")
