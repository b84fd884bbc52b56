"""The options of `firecaffe verify`."""

from firecaffe.cli.parser import Parser

USAGE = "RECIPE.toml [--nproc-per-node 1,2] [--steps 20] [--section.word value …]"


def make_parser() -> Parser:
    parser = Parser(
        "verify",
        USAGE,
        "Train the same recipe on several numbers of workers and compare all weights, buffers, "
        "optimizer state and losses after every step.",
        takes_recipe=True,
    )
    add = parser.add_argument
    add("--nproc-per-node", type=str, default="1,2", metavar="N,N", help="numbers of workers")
    add("--steps", type=int, default=20, metavar="N", help="steps of each training")
    return parser
