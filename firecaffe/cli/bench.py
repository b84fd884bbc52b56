"""`firecaffe bench PART`: measurements of this machine's exchanges, steps and input."""

from jsonargparse import ActionYesNo

from firecaffe.api.argument_checks import DEFAULT_CLUSTER
from firecaffe.cli.arguments import Parser, check_launched, show
from firecaffe.errors import RecipeError
from firecaffe.exchange import EXCHANGES

EXCHANGE_USAGE = (
    "[--nproc-per-node N] [--exchanges all|a,b,…] [--compressors a,b,…] [-b 8] [-e 128M] [-f 2] "
    "[-n 7] [--no-shared-memory] [--link BITS_PER_S] [--json]"
)
EXCHANGE_NOTES = (
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


def make_parser_bench_exchange() -> Parser:
    parser = Parser(
        "bench exchange",
        EXCHANGE_USAGE,
        "Measure exchanges side by side with the backend's own all_reduce, and the link between "
        "two ranks.",
        notes=EXCHANGE_NOTES,
    )
    add, flag = parser.add, parser.flag
    add("--nproc-per-node", "N", "ranks to start on this host", default=2)
    add(
        "--exchanges",
        "A,B",
        f"all, or some of {', '.join((*EXCHANGES, 'hierarchical(INNER,OUTER)'))}",
        default="all",
    )
    add(
        "--compressors",
        "A,B",
        "codecs whose sums are timed too, as exchange.compressor has them",
        type=str,
    )
    add(
        "--minbytes",
        "SIZE",
        "smallest size, in bytes; K, M and G are of 1024",
        short="-b",
        default="8",
    )
    add("--maxbytes", "SIZE", "largest size", short="-e", default="128M")
    add("--stepfactor", "N", "factor from size to size", short="-f", default=2)
    add("--iters", "N", "repetitions that count", short="-n", default=7)
    add("--device", help="auto, cpu or cuda", default="auto")
    add(
        "--link",
        "RATE",
        "rate of a rank's link, one way, in bits/s, as 200M or 2.5G (k is 1000); else as measured",
        type=str,
    )
    add(
        "--shared-memory",
        help="ranks of one host add in shared memory, as in training",
        action=ActionYesNo(no_prefix="no-"),
        default=True,
    )
    parser.add_port()
    flag("--json", "print one JSON object, complete")
    return parser


def main_bench_exchange(argv: list[str]) -> None:
    from firecaffe.api.exchange_bench import bench_exchange
    from firecaffe.cluster.world import is_launched

    parser = make_parser_bench_exchange()
    options = parser.parse_args(argv)
    if is_launched():
        check_launched(parser, argv, options.nproc_per_node)
    answer = bench_exchange(**parser.arguments(options))
    if answer is not None:
        show(answer, options.json)


def add_cluster_file(parser: Parser) -> None:
    """Add --write, a cluster file for measurements, and --cluster, which it starts from."""
    parser.add("--write", "FILE", "the cluster file to write")
    parser.add_overwrite()
    parser.add(
        "--cluster",
        "NAME",
        f"with --write: the cluster that the file starts from; else {DEFAULT_CLUSTER}",
    )


STEP_USAGE = (
    "RECIPE.toml | --model NAME [--sizes 1,2,4,…] [--cluster NAME|FILE] "
    "[--write FILE.toml [--overwrite]]"
)


def make_parser_bench_step(has_recipe: bool = False) -> Parser:
    """Make the parser. With `has_recipe`, it lacks the options that replace a recipe."""
    parser = Parser(
        "bench step",
        STEP_USAGE,
        "Time the steps of one worker at each micro-batch size: samples/s and their share of the "
        "best, the update, memory, and the time by type of layer.",
        takes_recipe=True,
        instead={"train.micro_batch_size": "--sizes says which are measured"},
        notes=(
            "--write puts the measurements into a cluster file for `firecaffe plan`. From three "
            "sizes on, the device's efficiency and overhead are fitted to them.",
        ),
    )
    add, flag = parser.add, parser.flag
    add("--sizes", "N,N", "micro-batch sizes to measure", default="1,2,4,8,16,32")
    add("--seconds", "S", "least time for each size", default=2.0)
    add_cluster_file(parser)
    flag("--json", "print JSON")
    if not has_recipe:
        parser.add_network("instead of a recipe")
    return parser


def main_bench_step(argv: list[str]) -> None:
    from firecaffe.api.step_rates import bench_step
    from firecaffe.cli.typed_recipe import parse_optional_recipe

    recipe, parser, options = parse_optional_recipe(make_parser_bench_step, argv)
    if recipe is None and not options.model:
        raise RecipeError(f"give a recipe or --model; usage: firecaffe bench step {STEP_USAGE}")
    show(bench_step(recipe, **parser.arguments(options)), options.json)


DATA_NOTES = (
    "It says what limits and, with --model-rate, how many decoding threads and how much of this "
    "storage the rate takes. It also measures the same images as a folder of files and packed.",
    "Cold: the system is asked to forget the files. It may still know the names of new files, "
    "which favors the folder.",
    "--write puts the rates of storage and decoding into a cluster file, so that `plan` knows when "
    "a training waits for its data.",
)


def make_parser_bench_data() -> Parser:
    parser = Parser(
        "bench data",
        "PATH [--model-rate R] [--threads N] [--write FILE.toml [--overwrite]] [options]",
        "Measure the input of a packed data set, a folder of images or tar files: images/s of "
        "storage (cold and warm), decoding, cropping, batching and copying, alone and together.",
        notes=DATA_NOTES,
    )
    add, flag = parser.add, parser.flag
    add("path", help="a packed data set, a folder of images, or tar files", type=str)
    add("--model-rate", "R", "images/s that a node's training needs", default=0.0)
    add("--images", "N", "measure at most so many, drawn at random", default=1000)
    add("--threads", "N", "threads; 0: one for each core", default=0)
    add("--resize", "S", "data.resize", default=256)
    add("--crop", "S", "data.crop", default=224)
    add_cluster_file(parser)
    flag("--json", "print JSON")
    return parser


def main_bench_data(argv: list[str]) -> None:
    from firecaffe.api.input_rates import bench_data

    parser = make_parser_bench_data()
    options = parser.parse_args(argv)
    show(bench_data(**parser.arguments(options)), options.json)


PARTS = {"exchange": main_bench_exchange, "step": main_bench_step, "data": main_bench_data}


def main(argv: list[str]) -> None:
    if not argv or argv[0] not in PARTS:
        given = repr(argv[0]) if argv else "nothing"
        raise RecipeError(
            f"bench measures `exchange`, `step` or `data`, as in `bench exchange`; found {given}"
        )
    PARTS[argv[0]](argv[1:])
