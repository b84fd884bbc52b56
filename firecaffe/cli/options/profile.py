"""The options of `firecaffe profile`."""

from firecaffe.cli.options.network import NAME, network_words
from firecaffe.cli.parser import Parser


def make_parser() -> Parser:
    parser = Parser(
        "profile",
        "MODEL|NET.fcz [--args TABLE] [--batch-size B] [--input 3x224x224] "
        "[--parallel [--workers N]] [--json]",
        "Shapes, parameters, activations and FLOPs of a network; takes no memory.",
    )
    add = parser.add
    add("model", type=str, help=f"{NAME}; or a file of firecaffe compress")
    add("--batch-size", type=int, default=1, metavar="B", help="samples at once")
    network_words(add)
    add(
        "--parallel",
        action="store_true",
        help="what each worker sends by data, and with layers split; B is of all workers",
    )
    add("--workers", type=int, default=None, metavar="N", help="with --parallel; else 8")
    parser.add_trust()
    add("--json", action="store_true", help="print JSON")
    return parser
