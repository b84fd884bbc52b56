"""`firecaffe evaluate RUN`: a run's network on its test data, or on other data."""

from firecaffe.cli.arguments import Parser

NOTES = (
    "The numbers are those that the run has at its end, bit for bit, on any number of ranks.",
    "--data.… options take other data, whose test part is evaluated; --task.metrics takes other "
    "metrics.",
    "Classes are matched by name. Other data may have some of the run's classes, in any order; a "
    "class that the run does not know is an error. Classes without names are matched by number.",
    "What the run was given in Python must be named: --model.name path/file.py:function, "
    "--data.name, --task.name. One line lists what is missing.",
)


def make_parser() -> Parser:
    parser = Parser(
        "evaluate",
        "RUN [--best] [--nproc-per-node N] [--data.name NAME] [--data.path FOLDER] [--json]",
        "Measure the loss and the metrics of a run's network on its test data, or on other data.",
        takes_recipe=True,
        notes=NOTES,
    )
    add = parser.add
    parser.add_best()
    parser.add_trust()
    add("--nproc-per-node", default=1, metavar="N", help="ranks to start on this host")
    add("--json", action="store_true", help="print one JSON object instead")
    return parser


def main(argv: list[str]) -> int:
    from firecaffe.api.use_a_run import evaluate
    from firecaffe.cli.arguments import check_launched, show
    from firecaffe.cli.typed_run import parse_run
    from firecaffe.cluster.groups import who_am_i
    from firecaffe.cluster.world import is_launched

    parser = make_parser()
    typed = parse_run(parser, argv)
    options = typed.options
    if is_launched():
        check_launched(parser, argv, options.nproc_per_node)
    answer = evaluate(typed.where, **parser.arguments(options), replace=typed.replaced)
    if who_am_i()[0] == 0:
        show(answer, options.json)
    return 0
