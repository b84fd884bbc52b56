"""`firecaffe compare RUN [RUN…]`: a table of finished runs and of the fields that differ."""

from firecaffe.cli.arguments import Parser, show

USAGE = (
    "RUN [RUN…] [--baseline RUN] [--by recipe] [--target VALUE] [--band POINTS] "
    "[--html FILE [--overwrite]] [--allow-unequal] [--json]"
)
NOTES = (
    "The metric is the one by which the runs' task chooses (task.metric). Shares are in per cent.",
    "A speedup needs the same work: data, augmentation, network and samples seen. Otherwise the "
    "reason is given instead, or with --allow-unequal the speedup, marked.",
    "A run that did not learn has no speedup: its top-1 is not above the share of the largest "
    "class, or its R² is not above 0.",
    "--by recipe groups runs that differ only in their seed. A group has the mean and a 95 % "
    "interval; groups are compared with the first one: equivalent, different, or not enough runs "
    "to say. Below stands a checklist of what a comparison needs.",
    "--html needs matplotlib: pip install 'firecaffe[plot]'.",
)


def make_parser() -> Parser:
    parser = Parser(
        "compare",
        USAGE,
        "Compare finished runs: rate, speedup against the first one, accuracy, weights, and every "
        "hyperparameter that differs.",
        notes=NOTES,
    )
    add, flag = parser.add, parser.flag
    add("runs", help="run folders; the first is the baseline", nargs="+", type=str)
    add("--baseline", "RUN", "the baseline, if it is not the first")
    add("--by", help="recipe: group runs over seeds", choices=["run", "recipe"], default="run")
    add(
        "--target",
        "VALUE",
        "with --by recipe: compare the time to this value of the metric",
        type=float,
    )
    add(
        "--band",
        "POINTS",
        "with --by recipe: differences of the metric up to this are equivalent; else 0.3 "
        "points of a share, 1 in 100 of others",
        type=float,
    )
    flag("--allow-unequal", "show speedups between runs of unequal work, marked")
    add("--html", "FILE", "write a page with curves, in one file")
    parser.add_overwrite()
    flag("--json", "print one JSON object instead")
    return parser


def main(argv: list[str]) -> None:
    from firecaffe.api.comparison import compare

    parser = make_parser()
    options = parser.parse_args(argv)
    show(compare(**parser.arguments(options)), options.json)
