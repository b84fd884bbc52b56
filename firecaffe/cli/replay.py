"""`firecaffe replay RUN`: compute the same bits again from the run's log of events alone."""

from firecaffe.cli.arguments import Parser

NOTES = (
    "It prints `same`, or ends with exit code 7. A damaged line of the log gives exit code 8 and "
    "the line's number.",
    "A run that did not finish is computed up to its newest checkpoint.",
    "What the run was given in Python must be named, as for `evaluate`.",
)


def make_parser() -> Parser:
    parser = Parser(
        "replay",
        "RUN [--to FOLDER]",
        "Compute a run with a server again, on one worker, from its recipe and its log of events "
        "alone, and compare the digests of weights, buffers, optimizer state and losses.",
        takes_recipe=True,
        notes=NOTES,
    )
    parser.add("--to", metavar="FOLDER", help="save the result as a checkpoint")
    parser.add_trust()
    return parser


def main(argv: list[str]) -> int:
    from firecaffe.api.same_bits import replay
    from firecaffe.cli.arguments import show
    from firecaffe.cli.typed_run import parse_run
    from firecaffe.cluster.groups import check_alone

    check_alone("replay")
    parser = make_parser()
    typed = parse_run(parser, argv)
    show(replay(typed.where, **parser.arguments(typed.options), replace=typed.replaced))
    return 0
