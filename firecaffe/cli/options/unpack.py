"""The options of `firecaffe unpack`."""

from firecaffe.cli.parser import Parser


def make_parser() -> Parser:
    parser = Parser(
        "unpack",
        "NET.fcz [--to NET.safetensors] [--overwrite]",
        "The weights of a .fcz file as safetensors, to the bit. No network is built, so that the "
        "file may be a stranger's.",
    )
    add = parser.add
    add("paths", nargs="*", metavar="NET.fcz", help="one file")
    add("--to", type=str, default="", metavar="FILE", help="else the same name, .safetensors")
    parser.add_overwrite()
    return parser
