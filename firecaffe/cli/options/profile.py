"""The options of `firecaffe profile`."""

from firecaffe.cli.options.network import NAME, network_words
from firecaffe.cli.parser import Parser


def make_parser() -> Parser:
    parser = Parser(
        "profile",
        "MODEL [--args TABLE] [--batch-size B] [--input 3x224x224] [--json]",
        "Shapes, parameters, activations and FLOPs of a network; takes no memory.",
    )
    add = parser.add_argument
    add("model", type=str, help=NAME)
    add("--batch-size", type=int, default=1, metavar="B", help="samples at once")
    network_words(add)
    add("--json", action="store_true", help="print JSON")
    return parser
