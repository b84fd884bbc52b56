"""`firecaffe check`: checks a cluster, and measures what a plan needs to know about it."""

from firecaffe.cli.arguments import Parser, check_launched, show
from firecaffe.cli.train import add_host_options

USAGE = (
    "[RECIPE.toml | --model NAME] [--nproc-per-node N] "
    "[--nnodes N --rdzv-endpoint HOST:PORT --rdzv-id NAME --secret-file FILE] "
    "[--write CLUSTER.toml [--overwrite]]"
)
ABOUT = (
    "Check a cluster before a training: versions, clocks, memory, disks, every link between "
    "hosts, every rank's rate. Slow ranks and links are named. --write saves the cluster file that "
    "`firecaffe plan` reads."
)

NOTES = (
    "Type it on every host, or start it with torchrun. Latency and bandwidth are measured between "
    "every two hosts, in turns, so that no two measurements share a port. Latency is half a round "
    "trip, longer than the fastest tenth of those measured.",
    "A rank or a link is named as slow if it is at least a tenth slower, and beyond the noise "
    "(rank-sum tests at p < 0.01 over all together).",
    "With a recipe it also measures the steps of its network on all ranks at the same time, how "
    "much an exchange slows them down, and the times of its exchange. It says what the network "
    "keeps, changes and draws.",
    "Of a recipe with a split or stages, each rank times the whole network; exchanges of "
    "activations are left out.",
)


def make_parser(has_recipe: bool = False) -> Parser:
    """Make the parser. With `has_recipe`, it lacks the options that replace a recipe."""
    parser = Parser("check", USAGE, ABOUT, takes_recipe=True, notes=NOTES)
    add, flag = parser.add, parser.flag
    add("--nproc-per-node", "N", "ranks to start on this host", default=1)
    add("--write", "FILE", "the cluster file to write")
    parser.add_overwrite()
    add("--folder", help="folder whose file system is measured", default=".")
    parser.add_port()
    flag("--json", "print JSON")
    add_host_options(parser, "check")
    if not has_recipe:
        add = parser.add_network("without a recipe")
        add("--device", help="auto, cpu or cuda", default="auto")
    return parser


def main(argv: list[str]) -> None:
    from firecaffe.api.cluster_check import check
    from firecaffe.cli.typed_recipe import parse_optional_recipe
    from firecaffe.cluster.world import is_launched

    recipe, parser, options = parse_optional_recipe(make_parser, argv)
    if is_launched(options.nnodes):
        check_launched(make_parser(), argv, options.nproc_per_node)
    answer = check(recipe, **parser.arguments(options))
    if answer is not None:
        show(answer, options.json)
