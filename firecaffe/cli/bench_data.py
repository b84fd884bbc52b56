"""`firecaffe bench data PATH`: images/s of each stage of the input, and the slowest stage."""

from firecaffe.cli.arguments import Parser
from firecaffe.cli.shared_options import add_cluster_file

USAGE = "PATH [--model-rate R] [--threads N] [--write FILE.toml [--overwrite]] [options]"
ABOUT = (
    "Measure the input of a packed data set, a folder of images or tar files: images/s of storage "
    "(cold and warm), decoding, cropping, batching and copying, alone and together."
)

NOTES = (
    "It says what limits and, with --model-rate, how many decoding threads and how much of this "
    "storage the rate takes. It also measures the same images as a folder of files and packed.",
    "Cold: the system is asked to forget the files. It may still know the names of new files, "
    "which favors the folder.",
    "--write puts the rates of storage and decoding into a cluster file, so that `plan` knows when "
    "a training waits for its data.",
)


def make_parser() -> Parser:
    parser = Parser("bench data", USAGE, ABOUT, notes=NOTES)
    add = parser.add
    add("path", type=str, help="a packed data set, a folder of images, or tar files")
    add("--model-rate", default=0.0, metavar="R", help="images/s that a node's training needs")
    add("--images", default=1000, metavar="N", help="measure at most so many, drawn at random")
    add("--threads", default=0, metavar="N", help="threads; 0: one for each core")
    add("--resize", default=256, metavar="S", help="data.resize")
    add("--crop", default=224, metavar="S", help="data.crop")
    add_cluster_file(parser, "the cluster file to write")
    add("--json", action="store_true", help="print JSON")
    return parser


def main(argv: list[str]) -> int:
    from firecaffe.api.input_rates import bench_data
    from firecaffe.cli.arguments import show

    parser = make_parser()
    options = parser.parse_args(argv)
    show(bench_data(**parser.arguments(options)), options.json)
    return 0
