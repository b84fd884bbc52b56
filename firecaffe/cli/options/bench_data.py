"""The options of `firecaffe bench data`."""

from firecaffe.cli.options.bench_step import cluster_file
from firecaffe.cli.parser import Parser

USAGE = "PATH [--model-rate R] [--threads N] [--write FILE.toml [--overwrite]] [options]"
ABOUT = (
    "Measure the input of a packed data set, a folder of images or tar files: images/s of storage, "
    "decoding, cropping, batching and copying, alone and together; what limits; and what another "
    "format would give."
)


def make_parser() -> Parser:
    parser = Parser("bench data", USAGE, ABOUT)
    add = parser.add
    add("path", type=str, help="a packed data set, a folder of images, or tar files")
    add(
        "--model-rate",
        type=float,
        default=0.0,
        metavar="R",
        help="images/s that a training wants of a node",
    )
    add(
        "--images",
        type=int,
        default=1000,
        metavar="N",
        help="that are measured, at most, at random",
    )
    add("--threads", type=int, default=0, metavar="N", help="0: one for each core")
    add("--resize", type=int, default=256, metavar="S", help="data.resize")
    add("--crop", type=int, default=224, metavar="S", help="data.crop")
    cluster_file(parser, "a cluster file with these rates, for plan")
    add("--json", action="store_true", help="print JSON")
    return parser
