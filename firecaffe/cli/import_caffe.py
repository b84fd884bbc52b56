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


def make_parser() -> Parser:
    parser = Parser(
        "import",
        USAGE,
        "A solver of Caffe's and its net as a recipe that trains to Caffe's own numbers, in a "
        "folder with the net as it is, and a report: what was understood, what is otherwise, what "
        "is left out, each with its line. Exit code 20 if anything is left out.",
    )
    add = parser.add
    add("paths", nargs="*", metavar="FILE.prototxt", help="a solver, or a net alone")
    add(
        "--weights",
        type=str,
        default="",
        metavar="FILE.caffemodel",
        help="first weights, for layers of the same names; others start afresh",
    )
    add(
        "--out",
        type=str,
        default="",
        metavar="FOLDER",
        help="where the recipe goes; else a folder here that is called as the file",
    )
    add(
        "--root",
        type=str,
        default="",
        metavar="FOLDER",
        help="what paths in the files are from; else they are looked for here, beside the file and "
        "in each folder above it",
    )
    add(
        "--input-shape",
        type=str,
        default="",
        metavar="CxHxW",
        help="of one sample, where the data are not there to say it",
    )
    parser.add_overwrite()
    return parser


def main(argv: list[str]) -> int:
    from firecaffe.api.network_argument import parse_input
    from firecaffe.from_caffe.recipe import NET, Asked, read
    from firecaffe.from_caffe.write_import import (
        RECIPE,
        REPORT,
        check_folder,
        files_of,
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
    imported = read(path, Asked(str(folder), options.root, shape, options.weights))
    write_folder(folder, files_of(imported, path))
    for line in imported.report.lines():
        say(line)
    say(f"written: {folder / RECIPE}, with {NET} and {REPORT} beside it")
    _end(imported, folder)
    return 0


def _end(imported: Imported, folder: Path) -> None:
    from firecaffe.from_caffe.write_import import RECIPE
    from firecaffe.training.records import say

    left = imported.report.left_out
    if left:
        first = f"{left[0].place}: {left[0].what}"
        raise LeftOutError(
            f"{count_of(len(left), 'thing', 'things')} left out of {folder / RECIPE}, as {first}"
        )
    say(f"next: firecaffe train {folder / RECIPE}")
