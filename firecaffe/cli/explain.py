"""`firecaffe explain RUN`: where the time went, which ranks are slow, the forecast's error."""

from firecaffe.cli.arguments import Parser


def make_parser() -> Parser:
    parser = Parser(
        "explain",
        "RUN | TRACE.json … [--json]",
        "Where the time of each rank of a run went, finished or not; the rank that is slow beyond "
        "the noise, in what it computes or in its link; and the run's forecast against it.",
    )
    parser.add("run", nargs="+", help="a run folder, or traces of torch's profiler")
    parser.add_trust()
    parser.add("--json", action="store_true", help="print one JSON object instead")
    return parser


def main(argv: list[str]) -> int:
    from firecaffe.api.explain import explain
    from firecaffe.cli.show import show

    options = make_parser().parse_args(argv)
    show(explain(options.run, trust_code=options.trust_code), options.json)
    return 0
