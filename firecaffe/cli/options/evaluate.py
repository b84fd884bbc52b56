"""The options of `firecaffe evaluate`."""

from firecaffe.cli.parser import Parser


def make_parser() -> Parser:
    parser = Parser(
        "evaluate",
        "RUN [--best] [--nproc-per-node N] [--data.name NAME] [--data.path FOLDER] [--json]",
        "The loss and metrics of a run's network on its test data, or on other data.",
        takes_recipe=True,
    )
    add = parser.add
    parser.add_best()
    parser.add_trust()
    add("--nproc-per-node", type=int, default=1, metavar="N", help="ranks to start on this host")
    add("--json", action="store_true", help="print one JSON object instead")
    return parser
