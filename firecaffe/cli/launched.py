"""Ranks of another launcher, as torchrun: what is said to ours has no effect there."""

import os

from firecaffe.cli.parser import Parser
from firecaffe.cluster.groups import who_am_i
from firecaffe.cluster.last_word import LAUNCHED
from firecaffe.errors import LaunchError, RecipeError

OF_OUR_LAUNCHER = (
    "--nnodes",
    "--rdzv-endpoint",
    "--rdzv-id",
    "--secret-file",
    "--master-port",
    "--max-restarts",
)


def check_launched(parser: Parser, argv: list[str], nproc_per_node: int | None) -> None:
    """nproc_per_node: as it was parsed. A rank of our own launcher has its command line as it was
    typed, and that is right.

    Raises: RecipeError if an option would start ranks that another launcher has started.
    """
    if LAUNCHED in os.environ:
        return
    typed = {option.partition("=")[0] for option in parser.read(argv).options}
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    wrong = [f"{name} has no effect" for name in OF_OUR_LAUNCHER if name in typed]
    if "--nproc-per-node" in typed and nproc_per_node != local:
        wrong.insert(0, f"--nproc-per-node is {nproc_per_node}")
    if wrong:
        raise RecipeError(
            f"{wrong[0]}, but a launcher (torchrun, mpirun, srun) has started this process as rank "
            f"{os.environ['RANK']} of {os.environ['WORLD_SIZE']}; leave the option out"
        )


def check_alone(command: str) -> None:
    """Raises: LaunchError if this process is one of several ranks, and the command one process."""
    rank, world_size = who_am_i()
    if world_size > 1:
        raise LaunchError(
            f"{command} computes in one process, and this one was started as rank {rank} of "
            f"{world_size} (RANK, WORLD_SIZE); start it without a launcher"
        )
