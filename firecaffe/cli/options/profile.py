"""The options of `firecaffe profile`."""

from firecaffe.cli.parser import Parser


def make_parser() -> Parser:
    parser = Parser(
        "profile",
        "MODEL [--batch-size B] [--input 3x224x224] [--json]",
        "Shapes, parameters, activations and FLOPs of a network; takes no memory.",
    )
    add = parser.add_argument
    add("model", type=str, help="a network of docs/models")
    add("--batch-size", type=int, default=1, metavar="B", help="images at once")
    add("--input", type=str, default="", metavar="CxHxW", help="as 3x224x224; else its own")
    add("--json", action="store_true", help="print JSON")
    return parser
