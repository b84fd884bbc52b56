"""`firecaffe import SOLVER_OR_NET.prototxt`: convert Caffe's files to a folder with a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from firecaffe.cli.arguments import Parser
from firecaffe.errors import LeftOutError, RecipeError, RunError
from firecaffe.value_checks import count_of

if TYPE_CHECKING:
    from firecaffe.from_caffe.recipe import Imported

USAGE = (
    "SOLVER_OR_NET.prototxt [--weights X.caffemodel] [--out FOLDER] [--root FOLDER] "
    "[--input-shape 3x227x227] [--overwrite]"
)
NOTES = (
    "The folder has recipe.toml, the net (net.prototxt), the solver, the weights as "
    "weights.safetensors if there are any, and report.md, which is printed too.",
    "A net without a solver gives a recipe with the default rate and length.",
    "Layers take the weights of the same name. A layer without one starts fresh; a layer of "
    "another shape is an error.",
    "If a setting has no counterpart, it is left out, the recipe is written and the exit code is "
    "20. If the net cannot be built, the command names the file and the line, and writes nothing.",
)


def make_parser() -> Parser:
    parser = Parser(
        "import",
        USAGE,
        "Convert a solver of Caffe's and its net to a recipe that trains to Caffe's own numbers. "
        "A report lists what was understood, what differs and what is left out, each with its "
        "line.",
        notes=NOTES,
    )
    add = parser.add
    add("paths", nargs="*", metavar="FILE.prototxt", help="a solver, or a net alone")
    add(
        "--weights",
        type=str,
        default="",
        metavar="FILE.caffemodel",
        help="first weights",
    )
    add(
        "--out",
        type=str,
        default="",
        metavar="FOLDER",
        help="where the recipe is written; else a folder here with the name of the file",
    )
    add(
        "--root",
        type=str,
        default="",
        metavar="FOLDER",
        help="folder that paths in the files start from; else they are looked for here, next to "
        "the file and in each folder above it",
    )
    add(
        "--input-shape",
        type=str,
        default="",
        metavar="CxHxW",
        help="shape of one sample; needed if the data are missing",
    )
    parser.add_overwrite()
    return parser


def main(argv: list[str]) -> int:
    from firecaffe.api.recipe_argument import parse_input
    from firecaffe.from_caffe.recipe import (
        NET,
        RECIPE,
        REPORT,
        ImportRequest,
        check_folder,
        files_of,
        read,
        write_folder,
    )
    from firecaffe.training.records import say

    parser = make_parser()
    options = parser.parse_args(argv)
    if len(options.paths) != 1:
        given = " and ".join(options.paths) or "none"
        raise RecipeError(f"import takes one file, found {given}; usage: {parser.usage}")
    path = Path(options.paths[0])
    folder = Path(options.out or path.stem)
    if options.root and not Path(options.root).is_dir():
        raise RunError(f"--root {options.root}: there is no such folder")
    shape = parse_input(options.input_shape, "--input-shape") if options.input_shape else ()
    check_folder(folder, options.overwrite)
    imported = read(path, ImportRequest(str(folder), options.root, shape, options.weights))
    write_folder(folder, files_of(imported, path))
    for line in imported.report.lines():
        say(line)
    say(f"written: {folder / RECIPE}, with {NET} and {REPORT}")
    _end(imported, folder)
    return 0


def _end(imported: Imported, folder: Path) -> None:
    from firecaffe.from_caffe.recipe import RECIPE
    from firecaffe.training.records import say

    left = imported.report.left_out
    if left:
        first = f"{left[0].place}: {left[0].what}"
        raise LeftOutError(
            f"{count_of(len(left), 'thing', 'things')} left out of {folder / RECIPE}, as {first}"
        )
    say(f"next: firecaffe train {folder / RECIPE}")
