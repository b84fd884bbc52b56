"""`firecaffe compress RUN`: make a trained network small, in one file, and report the loss."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jsonargparse import Namespace

from firecaffe.cli.arguments import Parser
from firecaffe.cli.console import check_target, make_console
from firecaffe.cli.picture import SUFFIXES, check_picture
from firecaffe.errors import NotKeptError, RecipeError
from firecaffe.files import finite, write_json
from firecaffe.recipe.sections import Recipe

if TYPE_CHECKING:
    from firecaffe.runs.measure import Measure
    from firecaffe.shrink.layer_sizes import LayerSensitivity

USAGE = (
    "RUN|RECIPE.toml [--scheme best|deep_compression|FILE.toml] [--target 40x|27KB|0.1points] "
    "[--best] [--nproc-per-node N] [--out NET.fcz [--overwrite]] [--plot FILE.png|.html] [--json]"
)


def make_parser() -> Parser:
    parser = Parser(
        "compress",
        USAGE,
        "Make a trained network small: prune, retrain, share values, retrain, code; one file, "
        "whose accuracy is that of the network decoded from it. Of a finished run, or of a recipe "
        "whose model.weights are trained. Exit code 16 if no size that was tried reaches the "
        "target.",
        takes_recipe=True,
        instead={
            "run.folder": "--out says where the file is, and the rounds lie beside it",
            "run.tuned": "rounds have rates of their own",
        },
    )
    add = parser.add
    add("--scheme", type=str, default="best", metavar="NAME", help="how; a name, or FILE.toml")
    add(
        "--target",
        type=str,
        default="",
        metavar="WHAT",
        help="40x, 27KB or 0.1points: search what each layer keeps, by held-out samples",
    )
    parser.add_best()
    parser.add_trust()
    add("--nproc-per-node", type=int, default=1, metavar="N", help="ranks of each training")
    add(
        "--out",
        type=str,
        default="",
        metavar="FILE",
        help="the file; else model.fcz in the run's folder, or RECIPE.fcz here",
    )
    add(
        "--plot",
        type=str,
        default="",
        metavar="FILE",
        help="draw size against error of all sizes that were tried: FILE.png or FILE.html",
    )
    parser.add_overwrite()
    add("--json", action="store_true", help="print one JSON object instead")
    return parser


SUFFIX = ".fcz"


def main(argv: list[str]) -> int:
    from firecaffe.cli.compress_report import not_reached, plot_sizes, report, sensitivity_charts
    from firecaffe.cli.launched import check_alone
    from firecaffe.cluster.world import join
    from firecaffe.shrink.compress_network import CompressRequest, compress
    from firecaffe.shrink.compression_record import as_record
    from firecaffe.shrink.scheme import find_scheme
    from firecaffe.shrink.start_network import parse_target

    check_alone("compress")
    recipe, options, out = _read(argv)
    if options.nproc_per_node < 1:
        raise RecipeError(f"--nproc-per-node is {options.nproc_per_node}; it must be at least 1")
    check_target("--out", str(out), options.overwrite, (SUFFIX,))
    record_to = out.with_suffix(".json")
    is_ours = options.overwrite and out.exists()  # otherwise the record belongs to another file
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
        compressed = compress(asked, world, say, say_layers)
    record = as_record(compressed)
    if compressed.reached:
        write_json(record_to, record)
    if options.plot:
        plot_sizes(Path(options.plot), record)
    if options.json:
        print(json.dumps(finite(record), indent=2))
    else:
        console = make_console()
        for part in report(record):
            console.print(part, markup=False)
    if not compressed.reached:
        raise NotKeptError(not_reached(record))
    return 0


def _read(argv: list[str]) -> tuple[Recipe, Namespace, Path]:
    from firecaffe.cli.typed_recipe import parse_recipe
    from firecaffe.cli.typed_run import parse_run
    from firecaffe.shrink.start_network import check_weights, recipe_of_run
    from firecaffe.training.load import run_of
    from firecaffe.training.named import check_named

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
