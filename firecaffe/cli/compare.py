"""`firecaffe compare RUN [RUN…]`: a table of finished runs and of the fields that differ."""

from firecaffe.cli.arguments import Parser

USAGE = (
    "RUN [RUN…] [--baseline RUN] [--by recipe] [--target VALUE] [--band POINTS] "
    "[--html FILE [--overwrite]] [--allow-unequal] [--json]"
)


def make_parser() -> Parser:
    parser = Parser(
        "compare",
        USAGE,
        "Compare finished runs: rate, speedup against the first one, accuracy, weights, and every "
        "hyperparameter that differs.",
    )
    add = parser.add
    add(
        "runs",
        nargs="+",
        type=str,
        help="run folders; the first is the baseline; --html draws the curves of one alone, too",
    )
    add("--baseline", type=str, default="", metavar="RUN", help="another than the first")
    add("--by", choices=["run", "recipe"], default="run", help="recipe: groups over seeds")
    add(
        "--target",
        type=float,
        default=None,
        metavar="VALUE",
        help="with --by recipe: time to this value of the task's metric; shares in per cent",
    )
    add(
        "--band",
        type=float,
        default=None,
        metavar="POINTS",
        help="with --by recipe: of the metric, that are no difference; 0.3 of shares, else 1 in "
        "100",
    )
    add("--allow-unequal", action="store_true", help="speedups between runs of other work, marked")
    add(
        "--html",
        type=str,
        default="",
        metavar="FILE",
        help="a page of the groups over seeds, with curves, in one file",
    )
    parser.add_overwrite()
    add("--json", action="store_true", help="print one JSON object instead")
    return parser


def main(argv: list[str]) -> int:
    from firecaffe.api.compare import compare
    from firecaffe.cli.show import show

    options = make_parser().parse_args(argv)
    answer = compare(
        options.runs,
        baseline=options.baseline,
        by=options.by,
        target=options.target,
        band=options.band,
        allow_unequal=options.allow_unequal,
        html=options.html,
        overwrite=options.overwrite,
    )
    show(answer, options.json)
    return 0
