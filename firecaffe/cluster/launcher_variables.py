"""The variables of mpirun and srun in torchrun's terms, and the addresses of hosts.

mpirun and srun tell each process its rank in their own variables. Without them, each process would
train alone on all the data, with no error. torchrun's own RANK and WORLD_SIZE count first, because
srun may have started a torchrun, or a launcher of ours.

Sources: docs.open-mpi.org, "Environment variables set for MPI applications"; MPICH's and Intel
MPI's process manager Hydra, as it sets them; srun(1), "Output environment variables".
"""

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from firecaffe.cluster.addresses import LOOPBACK
from firecaffe.errors import LaunchError

FIRST_PORT, NUM_PORTS = 15_000, 15_000
"""Ports that jobs may get: below the ephemeral ports of the system."""

DEFAULT_PORT = 29_500
"""The port that torchrun takes by default."""


@dataclass(frozen=True)
class Launcher:
    name: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str
    """The variable with the ranks of this host; Slurm's lists all hosts, as in 2(x3),1."""
    job: tuple[str, ...]
    """The variables that together are the job's number, equal on all of its ranks."""
    hosts: str = ""
    """The variable with the hosts in the order of ranks, if there is one."""
    also: tuple[str, ...] = ()
    """Other variables that a rank of this launcher has."""


LAUNCHERS = (
    Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        ("PMIX_NAMESPACE",),
    ),
    Launcher(
        "MPI",  # MPICH's, Intel's
        "PMI_RANK",
        "PMI_SIZE",
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
        (),
        also=("MPI_LOCALRANKID",),  # Slurm sets PMI's two for its own tasks
    ),
    Launcher(
        "Slurm",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",  # not SLURM_NTASKS, which a shell in an allocation has, too
        "SLURM_LOCALID",
        "SLURM_STEP_TASKS_PER_NODE",
        ("SLURM_JOB_ID", "SLURM_STEP_ID"),
        "SLURM_STEP_NODELIST",
        also=("SLURM_STEP_ID",),
    ),
    Launcher("a launcher of MPI's kind", "PMI_RANK", "PMI_SIZE", "LOCAL_RANK", "", ()),
)
"""The known launchers; the first match counts, as mpirun may start its ranks by srun."""

WORDS = "RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT"


def adopt_variables() -> None:
    """Set torchrun's variables from the launcher's. Raises: LaunchError if some are unknown."""
    os.environ.update(words_of(os.environ))


def words_of(environment: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables for this rank; none if it has them, or is the only rank."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return {}
    for launcher in LAUNCHERS:
        wanted = (launcher.rank, launcher.world_size, *launcher.also)
        if all(environment.get(name) for name in wanted):
            break
    else:
        return {}
    if environment[launcher.world_size] == "1":
        return {}
    try:
        node = int(environment["SLURM_NODEID"]) if launcher.hosts else 0
        local_world_size = tasks_of_node(environment[launcher.local_world_size], node)
        variables = {
            "RANK": environment[launcher.rank],
            "WORLD_SIZE": environment[launcher.world_size],
            "LOCAL_RANK": environment[launcher.local_rank],
            "LOCAL_WORLD_SIZE": str(local_world_size),
        }
        if not int(variables["RANK"]) < int(variables["WORLD_SIZE"]) >= local_world_size:
            raise ValueError(f"{launcher.rank}={variables['RANK']}")
        return variables | _meeting_place(launcher, environment, variables)
    except (KeyError, ValueError) as error:
        raise LaunchError(
            f"{launcher.name} says that this is rank {environment[launcher.rank]} of "
            f"{environment[launcher.world_size]} ({launcher.world_size}), but not all that a rank "
            f"needs to know ({error}); set {WORDS}, or start with torchrun"
        ) from error


def check_rank_and_size(environment: Mapping[str, str] = os.environ) -> None:
    """Check that RANK and WORLD_SIZE are set together. Raises: LaunchError."""
    # With only one of the two, the process would train alone.
    rank, world_size = environment.get("RANK"), environment.get("WORLD_SIZE")
    if rank is not None and world_size is None:
        raise LaunchError(f"RANK is {rank} and WORLD_SIZE is not set; set both, or neither")
    if rank is None and world_size not in (None, "1"):
        raise LaunchError(f"WORLD_SIZE is {world_size} and RANK is not set; set both, or neither")


def first_host(hosts: str) -> str:
    """Return the first host of a list like rack[1-3]-node[01-03,07],login. Raises: ValueError."""
    depth, end = 0, len(hosts)
    for place, letter in enumerate(hosts):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            end = place
            break
    # Brackets hold numbers and ranges of numbers, with leading zeros.
    host = re.sub(r"\[(\d+)[-,\d]*\]", r"\1", hosts[:end])
    if re.fullmatch(r"[\w.-]+", host) is None:
        raise ValueError(f"no host in {hosts!r}")
    return host


def tasks_of_node(tasks: str, node: int) -> int:
    """Return a node's number of tasks from counts such as 2(x3),1. Raises: ValueError."""
    counts = []
    for part in tasks.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError(f"no counts in {tasks!r}")
        counts += [int(match[1])] * int(match[2] or 1)
    if node >= len(counts):
        raise ValueError(f"no node {node} in {tasks!r}")
    return counts[node]


def _meeting_place(
    launcher: Launcher, environment: Mapping[str, str], variables: Mapping[str, str]
) -> dict[str, str]:
    host = environment.get("MASTER_ADDR", "")
    if not host and variables["LOCAL_WORLD_SIZE"] == variables["WORLD_SIZE"]:
        host = LOOPBACK
    if not host and not launcher.hosts:
        raise LaunchError(
            f"{launcher.name} has started {variables['WORLD_SIZE']} ranks on several hosts, and "
            "does not say on which one rank 0 is; set MASTER_ADDR to that host's name or address "
            "on all ranks (mpirun -x MASTER_ADDR=HOST, mpiexec -genv MASTER_ADDR HOST)"
        )
    port = environment.get("MASTER_PORT", "")
    if not port:
        job = ".".join(environment.get(name, "") for name in launcher.job)
        number = FIRST_PORT + zlib.crc32(job.encode()) % NUM_PORTS
        port = str(number if job.strip(".") else DEFAULT_PORT)
    return {"MASTER_ADDR": host or first_host(environment[launcher.hosts]), "MASTER_PORT": port}
