"""The options of `firecaffe data`."""

from firecaffe.cli.parser import Parser


def make_parser() -> Parser:
    parser = Parser("data", "get NAME [--dest FOLDER]", "Obtain a data set.")
    parser.add_argument("action", choices=["get"])
    parser.add_argument("name", type=str, help="fashion-mnist or mnist")
    parser.add_argument("--dest", type=str, default="", metavar="FOLDER", help="for its files")
    return parser
