"""A rank of this host that is gone: the others say which one, at once, and leave nothing behind.

Where nothing else is said, a rank would wait for longer than the tests do.
"""

import os
import re
import select
import signal
from pathlib import Path

import pytest
import torch

from firecaffe.cluster.agree import gather_text
from firecaffe.cluster.world import join
from firecaffe.errors import PeerLostError
from firecaffe.transport.exchange import Exchange
from firecaffe.transport.local_ranks import LocalRanks, meet_local_ranks
from tests.world import Ranks

LONG_S = 1000.0
SHORT_S = 2.0
CPU = torch.device("cpu")
MEMORY = "/memfd:firecaffe (deleted)"
"""How the system names memory that ranks share and that no folder has."""


def shared_files() -> set[str]:
    """The files that this process writes to by memory that others see."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    mapped = (line.split(maxsplit=5) for line in lines)
    return {name for _, rights, *_, name in mapped if rights == "rw-s"}


def kill_this(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def lose(victim: int, how: str) -> tuple[str, set[str]]:
    """What a survivor says, and the files of shared memory that it had mapped."""
    with join("cpu", timeout_s=LONG_S) as world:
        local = meet_local_ranks(world, LONG_S)
        assert local is not None
        exchange = Exchange.of_vectors(world, "tree", local)
        vector = exchange.empty(100_000, torch.float32, CPU)
        exchange.all_reduce(vector)
        files = shared_files()
        gather_text(world, "all are here")
        if world.rank == victim:
            if how == "leaves":
                exchange.close()
                return "", files
            if how == "killed in the sum":
                pytest.MonkeyPatch().setattr(exchange, "tree_sum", kill_this)
            elif how == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            else:
                kill_this()
        if how == "stopped":
            for peer in local.sockets.values():
                peer.settimeout(SHORT_S)
        if how == "killed, and a rank that saw it has left":
            last = max(rank for rank in range(world.world_size) if rank != victim)
            if world.rank == last:
                wait_for_others_to_leave(local, victim)
        try:
            if how == "killed before vectors are made":
                exchange.empty(1000, torch.float32, CPU)
            else:
                exchange.all_reduce(vector)
        except PeerLostError as error:
            return str(error), files
        finally:
            exchange.close()
    return "", files


def wait_for_others_to_leave(local: LocalRanks, victim: int) -> None:
    """Returns when only the victim's end, or nobody's, is still open."""
    for local_rank, peer in local.sockets.items():
        if local_rank != victim:
            poll = select.poll()
            poll.register(peer, 0)  # no event but the end of the other side
            poll.poll()


@pytest.mark.parametrize(
    ("world_size", "victim", "how"),
    [
        (2, 0, "killed at the barrier"),
        (4, 1, "killed at the barrier"),
        (4, 0, "killed in the sum"),
        (3, 2, "killed in the sum"),
        (3, 1, "killed before vectors are made"),
        (3, 2, "killed, and a rank that saw it has left"),
        (4, 1, "killed, and a rank that saw it has left"),
        (3, 0, "leaves"),
        (4, 1, "stopped"),
    ],
)
def test_the_others_name_the_rank_that_is_gone(
    ranks: Ranks, world_size: int, victim: int, how: str
) -> None:
    results = ranks.run(world_size, lose, victim, how, lost={victim})
    for rank, result in enumerate(results):
        if rank == victim:
            continue
        said, files = result
        # Whoever says goodbye is not lost to the watch; then the host's own sockets tell.
        words = "on this host, " if how == "leaves" else "on "
        assert re.match(rf"rank {victim},? {words}", said), said
        # Memory without a name goes with its last process, however that ends.
        assert files == {MEMORY}
