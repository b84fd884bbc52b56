"""The options of `firecaffe import`."""

from firecaffe.cli.parser import Parser

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
