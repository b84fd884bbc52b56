"""Worlds one after the other in one script, in any order, and beside the script's own; what a world
costs each of its ranks; groups of some ranks; and what a test is told of its ranks where one fails.
"""

import os
import re
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore, TCPStore
from torch.distributed import ProcessGroup

import firecaffe
from firecaffe.cluster import links
from firecaffe.cluster.agree import gather_text
from firecaffe.cluster.group import check_parts, divide
from firecaffe.cluster.groups import Groups
from firecaffe.cluster.process_settings import non_preempting_threads
from firecaffe.cluster.world import World, join
from firecaffe.errors import PeerLostError
from firecaffe.transport.exchange import Exchange
from tests import world
from tests.loopback import has_ipv6
from tests.world import RankError, Ranks

# --- worlds ---------------------------------------------------------------------------------------

AGENT, OWN_SERVER, IPV6 = "an agent's store", "rank 0's store", "rank 0's store, IPv6 alone"
MPIRUN = "rank 0's store, by Open MPI's words"


SAID = "first", "second", "last"


def hold_store(where: str) -> None:
    """Where the launcher has no store for its ranks, as mpirun has none, rank 0 holds it."""
    if where != AGENT:
        agent = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        if os.environ["RANK"] == "0":
            with socket.create_server(("127.0.0.1", 0)) as free:
                agent.set("port", str(free.getsockname()[1]))
        os.environ["MASTER_PORT"] = agent.get("port").decode()
        del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    if where == MPIRUN:
        # A shell's variables, as mpirun adds its own to them.
        for name in ("RANK", "LOCAL_RANK"):
            os.environ[f"OMPI_COMM_WORLD_{name}"] = os.environ.pop(name)
        for name, theirs in (("WORLD_SIZE", "SIZE"), ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")):
            os.environ[f"OMPI_COMM_WORLD_{theirs}"] = os.environ.pop(name)
        del os.environ["MASTER_ADDR"]
    if where == IPV6:
        os.environ["MASTER_ADDR"] = "::1"
        os.environ["LOCAL_WORLD_SIZE"] = "1"  # two hosts, for all they know
        vars(links)["own_addresses"] = lambda _: ["::1"]


def meet_once(said: str) -> list[str]:
    """What a training and a check begin and end with; both groups and the watch's sockets."""
    with join("cpu", 20) as world:
        assert len(world.watch.hosts) == world.world_size
        total = torch.ones(3)
        dist.all_reduce(total, group=world.exchange_group)
        assert total.tolist() == [world.world_size] * 3
        return gather_text(world, f"{said} {world.rank}")


def take_step() -> float:
    model = firecaffe.parallelize(nn.Linear(2, 1, bias=False))
    model(torch.full((1, 2), float(os.environ["RANK"]))).sum().backward()
    gradient = model.module.weight.grad
    assert isinstance(gradient, torch.Tensor)
    return float(gradient[0, 0])


def trainings_in_any_order(where: str) -> list[object]:
    hold_store(where)
    said: list[object] = [meet_once("first"), meet_once("second"), take_step(), take_step()]
    assert dist.is_initialized()  # DDP's, to the end of the script
    said += [meet_once("last"), take_step()]
    assert dist.is_initialized()
    return said


def a_world_of_the_scripts_own(where: str) -> list[object]:
    hold_store(where)
    dist.init_process_group("gloo")
    own = dist.new_group()
    said: list[object] = [meet_once("first"), meet_once("second"), take_step()]
    total = torch.ones(1)
    dist.all_reduce(total, group=own)
    assert total == 2
    said.append(take_step())
    dist.destroy_process_group()
    said += [meet_once("last"), take_step()]
    return said


@pytest.mark.parametrize(
    ("script", "where"),
    [
        *((trainings_in_any_order, where) for where in (AGENT, OWN_SERVER, MPIRUN)),
        (a_world_of_the_scripts_own, AGENT),
        pytest.param(
            *(a_world_of_the_scripts_own, IPV6),
            marks=pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6"),
        ),
    ],
)
def test_any_number_of_worlds_in_one_script(
    ranks: Ranks, script: Callable[[str], object], where: str
) -> None:
    """A world that is there is used and left alone."""
    first, second, last = ([f"{said} {rank}" for rank in range(2)] for said in SAID)
    assert ranks.run(2, script, where) == [[first, second, 0.5, 0.5, last, 0.5]] * 2


MOST_LINKS = 3 + 2 * (2 + 4)
"""A parent, two siblings, and the children and grandchildren in two trees."""

ALL_REDUCE = 6
"""Ranks that one of twelve exchanges with in two of Gloo's all-reduces and all-gathers, at most."""

OF_STORE = 4
"""Connections to the stores."""


def sockets() -> int:
    connections = psutil.Process().net_connections("tcp")
    return sum(each.status != psutil.CONN_LISTEN for each in connections)


def meet_all() -> tuple[int, int]:
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    before = sockets()
    with join("cpu", 60) as world:
        total = torch.ones(1)
        dist.all_reduce(total, group=world.exchange_group)
        assert total == world.world_size
        assert gather_text(world, str(world.rank)) == [str(rank) for rank in range(12)]
        return sockets() - before, store.num_keys()


def test_a_rank_has_few_sockets_and_the_store_few_keys(ranks: Ranks) -> None:
    for opened, keys in ranks.run(12, meet_all):
        assert opened <= MOST_LINKS + ALL_REDUCE + OF_STORE
        assert keys <= 8 * 12


def gather_long_texts() -> tuple[int, int]:
    """Bytes that the ranks told each other of texts that are the same, and of different ones."""
    moved = [0]

    def all_gather(rows: list[torch.Tensor], *others: Any, **options: Any) -> Any:
        moved[-1] += rows[0].numel()
        return whole(rows, *others, **options)

    whole = dist.all_gather
    with join("cpu", 60) as world, patch.object(dist, "all_gather", all_gather):
        assert gather_text(world, "x" * 100_000) == ["x" * 100_000] * 3
        moved.append(0)
        assert gather_text(world, "x" * 1000 * world.rank) == ["", "x" * 1000, "x" * 2000]
    return moved[0], moved[1]


def test_texts_are_sent_only_where_they_differ(ranks: Ranks) -> None:
    for of_same, of_different in ranks.shared(3, gather_long_texts):
        assert of_same < 100
        assert of_different < 2100


# --- groups ---------------------------------------------------------------------------------------

GROUPS = [[0, 1], [2, 3]], [[0, 2], [1, 3]], [[3, 1, 0], [2]]


def sums_of_groups() -> list[tuple[list[float], list[str]]]:
    """What this rank gets of the sum of ranks' powers of ten, and who is with it, in each group."""
    with join("cpu") as world:
        return [sum_in(world, parts) for parts in GROUPS]


def sum_in(world: World, parts: list[list[int]]) -> tuple[list[float], list[str]]:
    with divide(world, parts) as group:
        vector = torch.full((13,), 10.0**world.rank)
        Exchange.of_vectors(group, "tree").all_reduce(vector)
        return sorted({*vector.tolist()}), gather_text(group, str(world.rank))


def test_a_group_has_its_ranks_in_its_order(ranks: Ranks) -> None:
    for rank, sums in enumerate(ranks.shared(4, sums_of_groups)):
        own = [next(part for part in parts if rank in part) for parts in GROUPS]
        assert sums == [([sum(10.0**r for r in part)], [str(r) for r in part]) for part in own]


def policies() -> list[list[int]]:
    """How the kernel schedules Gloo's threads: a world's, with a script's, and with a row's."""
    with join("cpu") as world:
        found = [of_gloo()]
        theirs = dist.new_group(backend="gloo")
        found.append(of_gloo())
        with divide(world, [[0, 1], [2, 3]]):
            found.append(of_gloo())
        dist.destroy_process_group(theirs)
        assert os.sched_getscheduler(0) == os.SCHED_OTHER
    return found


def of_gloo() -> list[int]:
    names = {int(task.name): task / "comm" for task in Path("/proc/self/task").iterdir()}
    loops = [task for task, name in names.items() if name.read_text() == "gloo_tcp_loop\n"]
    return sorted(map(os.sched_getscheduler, loops))


def test_threads_of_gloo_interrupt_nobody_but_those_of_a_script_may(ranks: Ranks) -> None:
    ours, theirs = os.SCHED_BATCH, os.SCHED_OTHER
    for found in ranks.shared(4, policies):
        # Torch's own world has a thread, too, which nothing of ours uses.
        # A thread has its name a moment after it has begun, so some may not be counted yet.
        for seen, num_theirs in zip(found, (1, 2, 2), strict=True):
            assert seen.count(theirs) <= num_theirs
            assert set(seen[num_theirs:]) == {ours}


@pytest.mark.parametrize("made_world", [True, False])
def test_groups_of_a_lost_rank_are_aborted(
    made_world: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's shutdown waits for all ranks of a group."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    ended = []
    try:
        groups = Groups(dist.new_group(), dist.new_group(), HashStore(), made_world)
        with monkeypatch.context() as instead:
            for way in ("shutdown", "abort"):
                instead.setattr(ProcessGroup, way, lambda _, way=way: ended.append(way))
            groups.leave(is_lost=True)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    assert ended == ["abort"] * (3 if made_world else 2)


def test_where_a_container_forbids_it_threads_begin_as_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forbidden(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.sched_setscheduler", forbidden)
    with non_preempting_threads():
        begun = threading.Thread(target=lambda: None)
        begun.start()
    begun.join()


@pytest.mark.parametrize("parts", [[[0, 1]], [[0, 1], [1, 2]], [[0, 1, 2], []], [[0, 1, 3]]])
def test_parts_hold_each_rank_once(parts: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="each of 3 ranks once"):
        check_parts(3, parts)


# --- ranks that fail ------------------------------------------------------------------------------


def each_in_its_way() -> None:
    match int(os.environ["RANK"]):
        case 0:
            raise PeerLostError("rank 2 is gone")
        case 1:
            raise RuntimeError("Connection closed by peer [127.0.0.1]:1")
        case 2:
            raise KeyError("mine")


def kill_one_and_wait() -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()


def end_one() -> int:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return int(os.environ["RANK"])


def meet() -> str:
    with join("cpu") as found:
        return "".join(gather_text(found, os.environ["RANK"]))


def order(told: str) -> list[int]:
    return [int(number) for number in re.findall(r"^rank (\d):", told, re.MULTILINE)]


def test_every_rank_is_told_of_and_the_first_cause_first(ranks: Ranks) -> None:
    for call in (ranks.run, ranks.shared):
        with pytest.raises(RankError) as caught:
            call(4, each_in_its_way)
        first, *others, last = order(str(caught.value))
        assert (first, sorted(others), last) == (2, [0, 1], 3)
        for words in ("KeyError: 'mine'", "PeerLostError: rank 2 is gone", "rank 3: returned"):
            assert words in str(caught.value)


def test_a_rank_that_is_killed_is_the_cause_and_nobody_is_waited_for(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world, "AFTERWARDS_S", 0.1)
    with pytest.raises(RankError) as caught:
        ranks.run(2, kill_one_and_wait)
    assert str(caught.value) == "rank 1: its process ended with -9\nrank 0: no answer"


def test_in_the_place_of_a_lost_rank_another_starts(ranks: Ranks) -> None:
    assert ranks.shared(2, end_one, lost={1}) == [0, None]
    assert ranks.shared(2, meet) == ["01", "01"]
