"""`firecaffe train RECIPE.toml`: train, on N local ranks or in the world that torchrun made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from firecaffe.cluster.handover import handed

if TYPE_CHECKING:
    from firecaffe.cli.arguments import Parser

USAGE = (
    "RECIPE.toml [--nproc-per-node N] [--resume RUN] [--max-restarts K] "
    "[--nnodes MIN:MAX --rdzv-endpoint HOST:PORT --rdzv-id NAME --secret-file FILE] "
    "[--join HOST:PORT] "
    "[--section.word value …]"
)


def make_parser() -> Parser:
    from firecaffe.cli.arguments import Parser

    parser = Parser("train", USAGE, "Train the network of a recipe.", takes_recipe=True)
    add = parser.add
    add("--nproc-per-node", type=int, default=1, metavar="N", help="ranks to start on this host")
    add("--resume", type=str, default="", metavar="RUN", help="a run folder or a checkpoint")
    add("--max-restarts", type=int, default=0, metavar="K", help="most restarts after faults")
    add("--print-config", action="store_true", help="print the recipe with every word, and stop")
    add("--master-port", type=int, default=0, metavar="PORT", help="where ranks meet; 0: any")
    add("--join", type=str, default="", metavar="HOST:PORT", help="join a run as one more worker")
    several_hosts(parser, "run")
    return parser


def several_hosts(parser: Parser, what: str) -> None:
    """Add torchrun's options for several hosts, which meet for `what`: a run or a check."""
    add = parser.add_group("several hosts")
    nodes = "hosts: N, or MIN:MAX, which may leave and come" if what == "run" else "hosts"
    add("--nnodes", type=str, default="1", metavar="N", help=nodes)
    add("--rdzv-endpoint", type=str, default="", metavar="HOST:PORT", help="where they meet")
    add(
        "--rdzv-id",
        type=str,
        default="",
        metavar="NAME",
        help=f"of the {what}, the same on all hosts",
    )
    secret = "the run's secret, the same on all hosts, in a file of mode 0600"
    add("--secret-file", type=str, default="", metavar="FILE", help=secret)


def main(argv: list[str]) -> int:
    # A rank loads nothing that its launcher alone uses, nor a launcher what its ranks do.
    from firecaffe.recipe.checked_recipe import Prepared

    if isinstance(prepared := handed(), Prepared):
        from firecaffe.training.build_training import train_prepared

        train_prepared(prepared)
        return 0
    from firecaffe.cli.start_training import start

    return start(argv)
