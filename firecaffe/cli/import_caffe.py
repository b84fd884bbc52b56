"""`firecaffe import SOLVER_OR_NET.prototxt`: convert Caffe's files to a folder with a recipe."""

from firecaffe.cli.arguments import Parser
from firecaffe.errors import LeftOutError, RecipeError
from firecaffe.value_checks import count_of

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
    add("--weights", metavar="FILE.caffemodel", help="first weights")
    add(
        "--out",
        metavar="FOLDER",
        help="where the recipe is written; else a folder here with the name of the file",
    )
    add(
        "--root",
        metavar="FOLDER",
        help="folder that paths in the files start from; else they are looked for here, next to "
        "the file and in each folder above it",
    )
    add(
        "--input-shape", metavar="CxHxW", help="shape of one sample; needed if the data are missing"
    )
    parser.add_overwrite()
    return parser


def main(argv: list[str]) -> int:
    from firecaffe.api.take_in import import_caffe
    from firecaffe.cli.arguments import show

    parser = make_parser()
    options = parser.parse_args(argv)
    if len(options.paths) != 1:
        paths = " and ".join(options.paths) or "none"
        raise RecipeError(f"import takes one file, found {paths}; usage: {parser.usage}")
    given = parser.arguments(options)
    imported = import_caffe(*given.pop("paths"), **given)
    show(imported)
    if left := imported.report.left_out:
        raise LeftOutError(
            f"{count_of(len(left), 'thing', 'things')} left out of {imported.recipe_path}, as "
            f"{left[0].place}: {left[0].what}"
        )
    return 0
