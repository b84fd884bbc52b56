"""The options of `firecaffe check`."""

from firecaffe.cli.options.network import NAME, network_words
from firecaffe.cli.options.train import several_hosts
from firecaffe.cli.parser import Parser

USAGE = (
    "[RECIPE.toml | --model NAME] [--nproc-per-node N] "
    "[--nnodes N --rdzv-endpoint HOST:PORT --rdzv-id NAME --secret-file FILE] "
    "[--write CLUSTER.toml [--overwrite]]"
)
ABOUT = (
    "Look a cluster over before a training: versions, clocks, memory, disks, every link between "
    "hosts, every rank's rate; who is slow is named. --write: the cluster file that `firecaffe "
    "plan` reads; with a recipe its steps and its exchange are measured too."
)


def make_parser(has_recipe: bool = False) -> Parser:
    """Make the parser. With `has_recipe`, it lacks the options that replace a recipe."""
    parser = Parser("check", USAGE, ABOUT, takes_recipe=True)
    add = parser.add
    add("--nproc-per-node", type=int, default=1, metavar="N", help="ranks to start on this host")
    add("--write", type=str, default="", metavar="FILE", help="the cluster file to write")
    parser.add_overwrite()
    add("--folder", type=str, default=".", help="where files are written and read")
    add("--master-port", type=int, default=0, metavar="PORT", help="where ranks meet; 0: any")
    add("--json", action="store_true", help="print JSON")
    several_hosts(parser, "check")
    if not has_recipe:
        add = parser.add_group("without a recipe")
        add("--model", type=str, default="", metavar="NAME", help=NAME)
        network_words(add)
        add("--device", type=str, default="auto", help="auto, cpu or cuda")
    return parser
