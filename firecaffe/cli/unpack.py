"""`firecaffe unpack NET.fcz`: write the weights of a .fcz file as safetensors."""

from firecaffe.cli.arguments import Parser
from firecaffe.errors import RecipeError


def make_parser() -> Parser:
    parser = Parser(
        "unpack",
        "NET.fcz [--to NET.safetensors] [--overwrite]",
        "Write the weights of a .fcz file as safetensors, bit for bit, and print what the file "
        "says about its network.",
        notes=(
            "No network is built and no code is run, so the file may come from a stranger. "
            "Decoding takes less than 1 MB in addition to the largest tensor.",
        ),
    )
    add = parser.add
    add("paths", nargs="*", metavar="NET.fcz", help="the file")
    add("--to", metavar="FILE", help="the file to write; else the same name with .safetensors")
    parser.add_overwrite()
    return parser


def main(argv: list[str]) -> int:
    from firecaffe.api.files_of_weights import unpack
    from firecaffe.cli.arguments import show

    parser = make_parser()
    options = parser.parse_args(argv)
    if len(options.paths) != 1:
        given = " and ".join(options.paths) or "none"
        raise RecipeError(f"unpack takes one file, found {given}; usage: {parser.usage}")
    show(unpack(options.paths[0], to=options.to, overwrite=options.overwrite))
    return 0
