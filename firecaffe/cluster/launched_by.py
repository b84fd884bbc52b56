"""The variables of mpirun and srun in torchrun's terms, and the addresses of hosts.

mpirun and srun tell each process its rank in their own variables. Without them, each process would
train alone on all the data, with no error. torchrun's own RANK and WORLD_SIZE count first, because
srun may have started a torchrun, or a launcher of ours.

Sources: docs.open-mpi.org, "Environment variables set for MPI applications"; MPICH's and Intel
MPI's process manager Hydra, as it sets them; srun(1), "Output environment variables".
"""

import ipaddress
import os
import re
import socket
import zlib
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass

import psutil

from firecaffe.errors import LaunchError

LOOPBACK = "127.0.0.1"


def split_place(text: str) -> tuple[str, int]:
    """Splits HOST:PORT, or [IPv6]:PORT. Raises: ValueError if it is neither."""
    found = re.fullmatch(r"(?:\[([^\[\]\s]+)\]|([^:\[\]\s]+)):(\d{1,5})", text)
    port = int(found[3]) if found else 0
    if found is None or not 0 < port < 1 << 16:
        raise ValueError(f"{text!r} is not HOST:PORT, or [IPv6]:PORT")
    return found[1] or found[2], port


def join_place(host: str, port: int | str) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_known(host: str, word: str) -> None:
    """Check that a name, given by `word`, stands for a host. Raises: LaunchError."""
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError) as error:
        raise LaunchError(
            f"{word} names {host!r}, and no such host is known here: {error}"
        ) from error


def listen_at(host: str, port: int, backlog: int) -> socket.socket:
    """Opens a listener at one address of this host, by name or number; port 0 takes a free one."""
    family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(place[:2], family=family, backlog=backlog)


def listen_to_all(backlog: int, port: int = 0) -> socket.socket:
    """Opens a listener at all of this host's addresses; port 0 takes a free one."""
    if socket.has_dualstack_ipv6():
        everywhere = "", port
        family = socket.AF_INET6
        return socket.create_server(everywhere, family=family, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=backlog)


def own_addresses(towards: str) -> list[str]:
    """Return this host's outward addresses; the first is on the way to `towards`, best of IPv4."""
    found: list[str] = []
    with suppress(OSError, UnicodeError):
        ways = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)
        for family, kind, _, _, there in sorted(ways, key=lambda way: way[0] != socket.AF_INET):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(there)  # sends nothing
                found.append(probe.getsockname()[0])
    for each in psutil.net_if_addrs().values():
        known = (socket.AF_INET, socket.AF_INET6)
        found += [address.address for address in each if address.family in known]
    return [each for each in dict.fromkeys(found) if _is_outward(each)] or [LOOPBACK]


def is_here(host: str) -> bool:
    own = {each.address for addresses in psutil.net_if_addrs().values() for each in addresses}
    return any(found in own or _is_loopback(found) for found in _addresses_of(host))


def is_inward(name: str) -> bool:
    """Whether a host's name leads only to its loopback, as Debian's 127.0.1.1, or nowhere."""
    return all(_is_loopback(found) for found in _addresses_of(name))


def is_one_host(name: str) -> bool:
    """Whether a name says loopback literally, so that all who meet there are on one host."""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def check_outward(name: str, instead: str) -> None:
    """Check that others can find this host, if `name` leads inward. Raises: LaunchError."""
    found = own_addresses(name)
    if not is_inward(name) or is_one_host(name) or len({*map(interface_of, found)}) == 1:
        return
    here = ", ".join(_addresses_of(name)) or "not known"
    raise LaunchError(
        f"{name} is {here} on this host, where others do not reach it, and it has several "
        f"addresses ({', '.join(found)}); {instead}"
    )


def interface_of(address: str) -> str:
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return name
    return "lo"


def _is_outward(address: str) -> bool:
    # An IPv6 address of one link alone means nothing without the name of an interface.
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return not parsed.is_loopback and not (parsed.version == 6 and parsed.is_link_local)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _addresses_of(host: str) -> list[str]:
    try:
        return list(dict.fromkeys(str(found[4][0]) for found in socket.getaddrinfo(host, None)))
    except (OSError, UnicodeError):
        return []


FIRST_PORT, NUM_PORTS = 15_000, 15_000
"""Ports that jobs may get: below those that a system gives out by itself."""

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


def take_over(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set torchrun's variables from the launcher's. Raises: LaunchError if some cannot be known."""
    environment.update(words_of(environment))


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
        local_world_size = _on_this_host(launcher, environment)
        words = {
            "RANK": environment[launcher.rank],
            "WORLD_SIZE": environment[launcher.world_size],
            "LOCAL_RANK": environment[launcher.local_rank],
            "LOCAL_WORLD_SIZE": str(local_world_size),
        }
        if not int(words["RANK"]) < int(words["WORLD_SIZE"]) >= local_world_size:
            raise ValueError(f"{launcher.rank}={words['RANK']}")
        return words | _meeting_place(launcher, environment, words)
    except (KeyError, ValueError) as error:
        raise LaunchError(
            f"{launcher.name} says that this is rank {environment[launcher.rank]} of "
            f"{environment[launcher.world_size]} ({launcher.world_size}), but not all that a rank "
            f"needs to know ({error}); set {WORDS}, or start with torchrun"
        ) from error


def check_both_said(environment: Mapping[str, str] = os.environ) -> None:
    """Check that RANK and WORLD_SIZE are set together. Raises: LaunchError."""
    # Without the other one, the process would train alone.
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
    # In brackets are numbers and ranges of them, with their leading zeros.
    host = re.sub(r"\[(\d+)[-,\d]*\]", r"\1", hosts[:end])
    if re.fullmatch(r"[\w.-]+", host) is None:
        raise ValueError(f"no host in {hosts!r}")
    return host


def tasks_of_node(tasks: str, node: int) -> int:
    """Return a node's number of tasks from counts such as 2(x3),1. Raises: ValueError."""
    counts = []
    for part in tasks.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if found is None:
            raise ValueError(f"no counts in {tasks!r}")
        counts += [int(found[1])] * int(found[2] or 1)
    if node >= len(counts):
        raise ValueError(f"no node {node} in {tasks!r}")
    return counts[node]


def _on_this_host(launcher: Launcher, environment: Mapping[str, str]) -> int:
    counts = environment[launcher.local_world_size]
    return tasks_of_node(counts, int(environment["SLURM_NODEID"]) if launcher.hosts else 0)


def _meeting_place(
    launcher: Launcher, environment: Mapping[str, str], words: Mapping[str, str]
) -> dict[str, str]:
    host = environment.get("MASTER_ADDR", "")
    if not host and words["LOCAL_WORLD_SIZE"] == words["WORLD_SIZE"]:
        host = LOOPBACK
    if not host and not launcher.hosts:
        raise LaunchError(
            f"{launcher.name} has started {words['WORLD_SIZE']} ranks on several hosts, and does "
            "not say on which one rank 0 is; set MASTER_ADDR to that host's name or address on "
            "all ranks (mpirun -x MASTER_ADDR=HOST, mpiexec -genv MASTER_ADDR HOST)"
        )
    port = environment.get("MASTER_PORT", "")
    if not port:
        job = ".".join(environment.get(name, "") for name in launcher.job)
        number = FIRST_PORT + zlib.crc32(job.encode()) % NUM_PORTS
        port = str(number if job.strip(".") else DEFAULT_PORT)
    return {
        "MASTER_ADDR": host or first_host(environment[launcher.hosts]),
        "MASTER_PORT": port,
    }
