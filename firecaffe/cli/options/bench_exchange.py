"""The options of `firecaffe bench exchange`, named as in nccl-tests."""

from jsonargparse import ActionYesNo

from firecaffe.cli.parser import Parser
from firecaffe.exchange import EXCHANGES

USAGE = (
    "[--nproc-per-node N] [--exchanges all|a,b,…] [--compressors a,b,…] [-b 8] [-e 128M] [-f 2] "
    "[-n 7] [--no-shared-memory] [--link BITS_PER_S] [--json]"
)


def make_parser() -> Parser:
    parser = Parser(
        "bench exchange",
        USAGE,
        "Measure exchanges side by side with the backend's own all_reduce, and the link between "
        "two ranks. Every sum is checked.",
    )
    add = parser.add
    add(
        "--nproc-per-node",
        type=int,
        default=None,
        metavar="N",
        help="local ranks to start; 2 if nothing says how many",
    )
    add(
        "--exchanges",
        type=str,
        default="all",
        metavar="A,B",
        help=f"all, or some of {', '.join((*EXCHANGES, 'hierarchical(INNER,OUTER)'))}",
    )
    add(
        "--compressors",
        type=str,
        default=None,
        metavar="A,B",
        help="time compressed sums too, of one node a rank; their names: docs/exchange.md",
    )
    size, count = "SIZE", "N"
    add("-b", "--minbytes", type=str, default="8", metavar=size, help="smallest; K is 1024")
    add("-e", "--maxbytes", type=str, default="128M", metavar=size, help="largest")
    add("-f", "--stepfactor", type=int, default=2, metavar=count, help="from size to size")
    add("-n", "--iters", type=int, default=7, metavar=count, help="repetitions that count")
    add("--device", type=str, default="auto", help="auto, cpu or cuda")
    add(
        "--link",
        type=str,
        default=None,
        metavar="RATE",
        help="bits per second of a rank's link, one way, as 200M or 2.5G (k is 1000); without "
        "it the link is taken as it was measured",
    )
    add(
        "--shared-memory",
        action=ActionYesNo(no_prefix="no-"),
        default=True,
        help="ranks of one host add in the memory that they share, as in training",
    )
    add("--master-port", type=int, default=0, metavar="PORT", help="where ranks meet; 0: any")
    add("--json", action="store_true", help="print one JSON object, complete")
    return parser
