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
    add = parser.add
    add("exchange", type=str, help="name of the exchange")
    add("workers", type=int, help="number of ranks")
    add(
        "--ranks-per-node",
        default=1,
        metavar="M",
        help="ranks of a node, for hierarchical(INNER,OUTER) and --shared-memory",
    )
    add(
        "--shared-memory",
        action="store_true",
        help="ranks of a node add in shared memory, as in training on CPUs",
    )
    add(
        "--elements",
        type=int,
        metavar="N",
        help=f"length of the float32 vector; else {ELEMENTS_PER_RANK} for each rank",
    )
    add("--kind", choices=KINDS, default=ALL_REDUCE, help="another collective than an all-reduce")
    add(
        "--micro-batches",
        type=int,
        metavar="N",
        help=f"micro-batches of a step, for {FOLD}; else {MICRO_BATCHES}",
    )
    add("--draw", action="store_true", help="draw the rounds instead of a table")
    add("--json", action="store_true", help="print one JSON object, complete")
    return parser


def main(argv: list[str]) -> None:
    parser = make_parser()
    options = parser.parse_args(argv)
    if options.draw and options.json:
        raise RecipeError("--draw is a picture and --json none; leave one out")
    show(schedule(**parser.arguments(options)), options.json)
