"""`firecaffe schedule EXCHANGE WORKERS`: the rounds and transfers of an exchange."""

from firecaffe.api.exchange_rounds import ELEMENTS_PER_RANK, MICRO_BATCHES, schedule
from firecaffe.cli.arguments import Parser, show
from firecaffe.errors import RecipeError
from firecaffe.exchange import ALGORITHMS
from firecaffe.exchange.route import FOLD
from firecaffe.exchange.schedule import ALL_REDUCE, KINDS


def make_parser() -> Parser:
    parser = Parser(
        "schedule",
        "EXCHANGE WORKERS [--kind KIND] [--ranks-per-node M] [--shared-memory] [--elements N] "
        "[--draw] [--json]",
        f"Show the rounds and transfers of an exchange: {', '.join(ALGORITHMS)}, "
        f"'hierarchical(INNER,OUTER)', {FOLD}.",
        notes=(
            "It also says how far the bytes of the busiest rank are from the least possible, and "
            "whether the exchange adds in tree order.",
            "Quote 'hierarchical(INNER,OUTER)' for the shell. Each of its nodes has "
            "--ranks-per-node ranks. With --shared-memory only what goes between nodes counts as "
            "sent.",
        ),
    )
    add, flag = parser.add, parser.flag
    add("exchange", help="name of the exchange", type=str)
    add("workers", help="number of ranks", type=int)
    add(
        "--ranks-per-node",
        "M",
        "ranks of a node, for hierarchical(INNER,OUTER) and --shared-memory",
        default=1,
    )
    flag("--shared-memory", "ranks of a node add in shared memory, as in training on CPUs")
    add(
        "--elements",
        "N",
        f"length of the float32 vector; else {ELEMENTS_PER_RANK} for each rank",
        type=int,
    )
    add("--kind", help="another collective than an all-reduce", choices=KINDS, default=ALL_REDUCE)
    add(
        "--micro-batches",
        "N",
        f"micro-batches of a step, for {FOLD}; else {MICRO_BATCHES}",
        type=int,
    )
    flag("--draw", "draw the rounds instead of a table")
    flag("--json", "print one JSON object, complete")
    return parser


def main(argv: list[str]) -> None:
    parser = make_parser()
    options = parser.parse_args(argv)
    if options.draw and options.json:
        raise RecipeError("--draw is a picture and --json none; leave one out")
    show(schedule(**parser.arguments(options)), options.json)
