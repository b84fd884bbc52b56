"""Worlds one after the other in one script, in any order, and beside the script's own; and what a
world costs each of its ranks: sockets, keys in the store, bytes to agree.
"""

import os
import socket
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import TCPStore

import firecaffe
from firecaffe.cluster import links
from firecaffe.cluster.agree import gather_text
from firecaffe.cluster.links import most_links
from firecaffe.cluster.world import join
from tests.loopback import has_ipv6
from tests.world import Ranks

AGENT, OWN_SERVER, IPV6 = "an agent's store", "rank 0's store", "rank 0's store, IPv6 alone"
STORES = (
    AGENT,
    OWN_SERVER,
    pytest.param(
        IPV6,
        marks=pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6"),
    ),
)

MPIRUN = "rank 0's store, by Open MPI's words"


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
        assert world.watch is not None
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
    told: list[object] = [meet_once("first"), meet_once("second"), take_step(), take_step()]
    assert dist.is_initialized()  # DDP's, to the end of the script
    told += [meet_once("beside"), take_step()]
    assert dist.is_initialized()
    return told


def a_world_of_the_scripts_own(where: str) -> list[object]:
    hold_store(where)
    dist.init_process_group("gloo")
    own = dist.new_group()
    told: list[object] = [meet_once("inside"), meet_once("again"), take_step()]
    total = torch.ones(1)
    dist.all_reduce(total, group=own)
    told.append(total.item())
    dist.destroy_process_group()
    told += [meet_once("after"), take_step()]
    return told


@pytest.mark.parametrize("where", [*STORES, MPIRUN])
def test_any_number_of_worlds_in_one_script(ranks: Ranks, where: str) -> None:
    for told in ranks.run(2, trainings_in_any_order, where):
        names = [[f"{said} {rank}" for rank in range(2)] for said in ("first", "second", "beside")]
        assert told == [names[0], names[1], 0.5, 0.5, names[2], 0.5]


@pytest.mark.parametrize("where", STORES)
def test_a_world_that_is_there_is_used_and_left_alone(ranks: Ranks, where: str) -> None:
    for told in ranks.run(2, a_world_of_the_scripts_own, where):
        names = [[f"{said} {rank}" for rank in range(2)] for said in ("inside", "again", "after")]
        assert told == [names[0], names[1], 0.5, 2.0, names[2], 0.5]


ALL_REDUCE = 6
"""Ranks that one of twelve exchanges with in two of Gloo's all-reduces and all-gathers, at most."""

OF_STORE = 4
"""Connections to the stores."""


def sockets() -> int:
    connections = psutil.Process().net_connections("tcp")
    return sum(each.status != psutil.CONN_LISTEN for each in connections)


def meet_all() -> tuple[int, int, list[str]]:
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    before = sockets()
    with join("cpu", 60) as world:
        total = torch.ones(1)
        dist.all_reduce(total, group=world.exchange_group)
        assert total == world.world_size
        told = gather_text(world, str(world.rank))
        return sockets() - before, store.num_keys(), told


def test_a_rank_has_few_sockets_and_the_store_few_keys(ranks: Ranks) -> None:
    for opened, keys, told in ranks.run(12, meet_all):
        assert opened <= most_links() + ALL_REDUCE + OF_STORE
        assert keys <= 8 * 12
        assert told == [str(rank) for rank in range(12)]


def gather_long_texts() -> tuple[list[int], list[int], bool]:
    moved: list[int] = []

    def all_gather(rows: list[torch.Tensor], *others: Any, **options: Any) -> Any:
        moved.append(rows[0].numel())
        return whole(rows, *others, **options)

    with join("cpu", 60) as world:
        whole = dist.all_gather
        vars(dist)["all_gather"] = all_gather
        try:
            alike = gather_text(world, "x" * 100_000)
            first = moved.copy()
            texts = gather_text(world, "x" * 1000 * world.rank)
        finally:
            vars(dist)["all_gather"] = whole
        right = alike == ["x" * 100_000] * 3 and texts == ["", "x" * 1000, "x" * 2000]
        return first, moved[len(first) :], right


def test_texts_are_sent_only_where_they_differ(ranks: Ranks) -> None:
    for alike, different, right in ranks.shared(3, gather_long_texts):
        assert right
        assert sum(alike) < 100
        assert sum(different) < 2100
