"""The options of `firecaffe data`."""

from firecaffe.cli.parser import Parser


def make_parser() -> Parser:
    parser = Parser("data", "get NAME [--dest FOLDER]", "Obtain a data set.")
    parser.add("action", choices=["get"])
    parser.add("name", type=str, help="fashion-mnist or mnist")
    parser.add("--dest", type=str, default="", metavar="FOLDER", help="for its files")
    return parser
