"""The options of `firecaffe schedule`."""

from firecaffe.cli.parser import Parser
from firecaffe.exchange import ALGORITHMS
from firecaffe.exchange.route import FOLD
from firecaffe.exchange.schedule import ALL_REDUCE, KINDS

ELEMENTS_PER_RANK = 1024
"""Elements per rank with which all shards, though not all segments, are equal at every size."""

MICRO_BATCHES = 16


def make_parser() -> Parser:
    parser = Parser(
        "schedule",
        "EXCHANGE WORKERS [--kind KIND] [--ranks-per-node M] [--shared-memory] [--elements N] "
        "[--draw] [--json]",
        f"The rounds and transfers of an exchange: {', '.join(ALGORITHMS)}, "
        f"'hierarchical(INNER,OUTER)', {FOLD}.",
    )
    add = parser.add
    add("exchange", type=str, help="exchange.algorithm in a recipe")
    add("workers", type=int, help="how many ranks")
    add(
        "--ranks-per-node",
        type=int,
        default=1,
        metavar="M",
        help="how many ranks a node has, for hierarchical(INNER,OUTER) and --shared-memory",
    )
    add(
        "--shared-memory",
        action="store_true",
        help="ranks of a node add in memory that they share, as trainings on CPUs do",
    )
    add(
        "--elements",
        type=int,
        default=None,
        metavar="N",
        help=f"length of the float32 vector; by default {ELEMENTS_PER_RANK} for each rank, "
        "which gives equal shards",
    )
    add("--kind", choices=KINDS, default=ALL_REDUCE, help="another collective than an all-reduce")
    add(
        "--micro-batches",
        type=int,
        default=None,
        metavar="N",
        help=f"of a step, for {FOLD}; by default {MICRO_BATCHES}",
    )
    add("--draw", action="store_true", help="draw the rounds instead of a table")
    add("--json", action="store_true", help="print one JSON object, complete")
    return parser
