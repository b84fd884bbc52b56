"""`firecaffe train RECIPE.toml`: train, on N local ranks or in the world that torchrun made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from firecaffe.cluster.handover import handed

if TYPE_CHECKING:
    from firecaffe.cli.arguments import Parser

USAGE = (
    "RECIPE.toml [--nproc-per-node N] [--resume RUN] [--max-restarts K] "
    "[--nnodes MIN:MAX --rdzv-endpoint HOST:PORT --rdzv-id NAME --secret-file FILE] "
    "[--join HOST:PORT] [--section.word value …]"
)
NOTES = (
    "--resume takes a run folder or one checkpoint in it, such as RUN/checkpoints/best. The "
    "training continues in a new run folder, bit for bit, on any number of workers. From a run "
    "folder it takes the newest checkpoint that is undamaged.",
    "Under torchrun, srun or mpirun the command joins the launcher's world; it starts no ranks.",
    "--max-restarts restarts after a fault, in the same run folder.",
    "For several hosts, type the command on every host with --nnodes, --rdzv-endpoint, --rdzv-id "
    "and --secret-file. With --nnodes MIN:MAX, hosts may leave and come.",
    "Ctrl-C, SIGTERM, SIGUSR1 and a closed terminal stop the run. It saves a checkpoint and ends "
    "with exit code 75.",
    "A run that continues with another torch, or on a processor with other instructions, prints a "
    "line: its bits may differ from there on.",
)


def make_parser() -> Parser:
    from firecaffe.cli.arguments import Parser

    parser = Parser(
        "train", USAGE, "Train the network of a recipe.", takes_recipe=True, notes=NOTES
    )
    add, flag = parser.add, parser.flag
    add("--nproc-per-node", "N", "ranks to start on this host", default=1)
    add("--resume", "RUN", "continue from a run folder or a checkpoint")
    add("--max-restarts", "K", "restart up to K times", default=0)
    flag("--print-config", "print the recipe with all settings, and stop")
    parser.add_port()
    add("--join", "HOST:PORT", "compute for a running run with a server, as one more worker")
    add_host_options(parser, "run")
    return parser


def add_host_options(parser: Parser, what: str) -> None:
    """Add torchrun's options for several hosts, which meet for `what`: a run or a check."""
    add = parser.add_group("several hosts")
    nodes = "number of hosts: N, or MIN:MAX" if what == "run" else "number of hosts"
    add("--nnodes", "N", nodes, default="1")
    add("--rdzv-endpoint", "HOST:PORT", "where the hosts meet")
    add("--rdzv-id", "NAME", f"name of the {what}, the same on all hosts")
    secret = f"file with the {what}'s secret, the same on all hosts, of mode 0600"
    add("--secret-file", "FILE", secret)


def main(argv: list[str]) -> None:
    # A rank loads no module that only its launcher uses, and a launcher none that only ranks use.
    from firecaffe.recipe.checked_recipe import Prepared

    if isinstance(prepared := handed(), Prepared):
        from firecaffe.training.build_training import train_prepared

        train_prepared(prepared)
    else:
        from firecaffe.cli.start_training import start

        start(argv)
