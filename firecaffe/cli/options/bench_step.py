"""The options of `firecaffe bench step`."""

from firecaffe.cli.options.network import NAME, network_words
from firecaffe.cli.parser import Parser

USAGE = (
    "RECIPE.toml | --model NAME [--sizes 1,2,4,…] [--cluster NAME|FILE] "
    "[--write FILE.toml [--overwrite]]"
)
ABOUT = (
    "Time steps of one worker alone, against the micro-batch size: samples/s, time by type of "
    "layer, memory. With --write, a cluster file with what was measured, for `firecaffe plan`."
)
DEFAULT_SIZES = "1,2,4,8,16,32"
INSTEAD = {"train.micro_batch_size": "--sizes says which are measured"}


def make_parser(has_recipe: bool = False) -> Parser:
    """Make the parser. With `has_recipe`, it lacks the options that replace a recipe."""
    parser = Parser(
        "bench step",
        USAGE,
        ABOUT,
        takes_recipe=True,
        instead=INSTEAD,
    )
    add = parser.add
    add("--sizes", type=str, default=DEFAULT_SIZES, metavar="N,N", help="micro-batch sizes")
    add("--seconds", type=float, default=2.0, metavar="S", help="of each size, at least")
    cluster_file(parser, "a cluster file to write")
    add("--json", action="store_true", help="print JSON")
    if not has_recipe:
        add = parser.add_group("instead of a recipe")
        add("--model", type=str, default="", metavar="NAME", help=NAME)
        network_words(add)
    return parser


def cluster_file(parser: Parser, what: str) -> None:
    add = parser.add
    add("--write", type=str, default="", metavar="FILE", help=what)
    parser.add_overwrite()
    add(
        "--cluster",
        type=str,
        default="",
        metavar="NAME",
        help="with --write: what else the file says; else cpu-host",
    )
