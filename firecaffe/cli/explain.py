"""`firecaffe explain RUN`: where the time went, which ranks are slow, the forecast's error."""

from firecaffe.cli.arguments import Parser, show

NOTES = (
    "A rank is named as slow if it is beyond the noise: a signed-rank test over blocks of steps, "
    "and a rank-sum test over round trips, at p < 0.01 over all ranks (Holm). With two ranks, a "
    "link has no other to be compared with.",
    "The forecast that the run kept (run.cluster) is compared part by part. A part outside its "
    "range is the run's fault (a rank is slow) or the forecast's.",
    "Of a run with a server, it also reports what each rank computed, pulled and pushed, the "
    "updates, what was dropped, and the histogram of staleness. Of a split network, it reports how "
    "long ranks wait for activations and for gradients; of stages, how long each is idle.",
    "Traces are those of torch's profiler, one for each rank (.json, .json.gz, at most 1 GB "
    "unpacked). For your own training loop, firecaffe.adapt.attach writes the timings.",
)


def make_parser() -> Parser:
    parser = Parser(
        "explain",
        "RUN | TRACE.json … [--json]",
        "Show where the time of each rank of a run went, finished or not; which rank is slow, in "
        "computing or in its link; and how good the run's forecast was.",
        notes=NOTES,
    )
    parser.add("run", help="a run folder, or traces of torch's profiler", nargs="+")
    parser.add_trust()
    parser.flag("--json", "print one JSON object instead")
    return parser


def main(argv: list[str]) -> None:
    from firecaffe.api.explanation import explain

    parser = make_parser()
    options = parser.parse_args(argv)
    show(explain(**parser.arguments(options)), options.json)
