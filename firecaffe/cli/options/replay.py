"""The options of `firecaffe replay`."""

from firecaffe.cli.parser import Parser


def make_parser() -> Parser:
    parser = Parser(
        "replay",
        "RUN [--to FOLDER]",
        "Compute a run with a server again, on one worker, from its log of events alone, and "
        "compare the digests of weights, buffers and optimizer state.",
        takes_recipe=True,
    )
    parser.add(
        "--to", type=str, default="", metavar="FOLDER", help="keep what comes out, as a checkpoint"
    )
    parser.add_trust()
    return parser
