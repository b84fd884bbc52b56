"""Checks of command lines in processes that another launcher, such as torchrun, started."""

import os

from firecaffe.cli.arguments import Parser
from firecaffe.cluster.handover import LAUNCHED
from firecaffe.errors import RecipeError

OF_OUR_LAUNCHER = (
    "--nnodes",
    "--rdzv-endpoint",
    "--rdzv-id",
    "--secret-file",
    "--master-port",
    "--max-restarts",
)


def check_launched(parser: Parser, argv: list[str], nproc_per_node: int | None) -> None:
    """Raise RecipeError if an option would start ranks that another launcher has started.

    `nproc_per_node` is the parsed value. Ranks of our own launcher have the typed command line and
    are not checked.
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
