"""`firecaffe bench exchange`: times of the exchanges, the backend's all_reduce and the link."""

from jsonargparse import ActionYesNo

from firecaffe.cli.arguments import Parser
from firecaffe.exchange import EXCHANGES

USAGE = (
    "[--nproc-per-node N] [--exchanges all|a,b,…] [--compressors a,b,…] [-b 8] [-e 128M] [-f 2] "
    "[-n 7] [--no-shared-memory] [--link BITS_PER_S] [--json]"
)

NOTES = (
    "Options and columns are those of nccl-tests. Under torchrun the command measures that world.",
    "Every sum is checked before anything is timed, and in every repetition: sums of whole numbers "
    "exactly, sums in tree order also bit for bit. A compressed sum must be as near as its codec "
    "promises, and the same bits on all ranks. A wrong sum gives exit code 7.",
    "A time is that of the slowest rank; a row has the median, min and max. Exchanges take turns "
    "within each repetition. `/ native` is the median ratio to the backend's all_reduce.",
    "through: group (the backend's process group), memory (shared within a host), or both. wire: "
    "bytes one way through the busiest rank, without headers. algbw: size / time. busbw: algbw · "
    "2 (p - 1) / p. Both are in 10^9 bytes/s.",
    "The link is measured between rank 0 and the first rank of another node. of bound: the least "
    "time of any all-reduce on such links, 2 (p - 1) / p · size / link, over the time.",
    "auto, the last line, is what exchange.algorithm = auto would take at each size.",
)


def make_parser() -> Parser:
    parser = Parser(
        "bench exchange",
        USAGE,
        "Measure exchanges side by side with the backend's own all_reduce, and the link between "
        "two ranks.",
        notes=NOTES,
    )
    add = parser.add
    add("--nproc-per-node", default=2, metavar="N", help="ranks to start on this host")
    add(
        "--exchanges",
        default="all",
        metavar="A,B",
        help=f"all, or some of {', '.join((*EXCHANGES, 'hierarchical(INNER,OUTER)'))}",
    )
    add(
        "--compressors",
        type=str,
        metavar="A,B",
        help="codecs whose sums are timed too, as exchange.compressor has them",
    )
    size, count = "SIZE", "N"
    add(
        "-b",
        "--minbytes",
        default="8",
        metavar=size,
        help="smallest size, in bytes; K, M and G are of 1024",
    )
    add("-e", "--maxbytes", default="128M", metavar=size, help="largest size")
    add("-f", "--stepfactor", default=2, metavar=count, help="factor from size to size")
    add("-n", "--iters", default=7, metavar=count, help="repetitions that count")
    add("--device", default="auto", help="auto, cpu or cuda")
    add(
        "--link",
        type=str,
        metavar="RATE",
        help="rate of a rank's link, one way, in bits/s, as 200M or 2.5G (k is 1000); else as "
        "measured",
    )
    add(
        "--shared-memory",
        action=ActionYesNo(no_prefix="no-"),
        default=True,
        help="ranks of one host add in shared memory, as in training",
    )
    add(
        "--master-port", default=0, metavar="PORT", help="port at which ranks meet; 0: any free one"
    )
    add("--json", action="store_true", help="print one JSON object, complete")
    return parser


def main(argv: list[str]) -> int:
    from firecaffe.api.exchange_bench import bench_exchange
    from firecaffe.cli.arguments import check_launched, show
    from firecaffe.cluster.world import is_launched

    parser = make_parser()
    options = parser.parse_args(argv)
    if is_launched():
        check_launched(parser, argv, options.nproc_per_node)
    answer = bench_exchange(**parser.arguments(options))
    if answer is not None:
        show(answer, options.json)
    return 0
