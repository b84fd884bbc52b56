"""What a world costs each of its ranks: sockets, keys in the store, bytes to agree."""

import os
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from firecaffe.cluster.agree import gather_text
from firecaffe.cluster.links import most_links
from firecaffe.cluster.world import join
from tests.world import Ranks

ALL_REDUCE = 6
"""Ranks that one of twelve exchanges with in two of Gloo's all-reduces and all-gathers, at most."""

OF_STORE = 4
"""Connections to the stores."""


def sockets() -> int:
    connections = psutil.Process().net_connections("tcp")
    return sum(each.status != psutil.CONN_LISTEN for each in connections)


def meet() -> tuple[int, int, list[str]]:
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    before = sockets()
    with join("cpu", 60) as world:
        total = torch.ones(1)
        dist.all_reduce(total, group=world.exchange_group)
        assert total == world.world_size
        told = gather_text(world, str(world.rank))
        return sockets() - before, store.num_keys(), told


def test_a_rank_has_few_sockets_and_the_store_few_keys(ranks: Ranks) -> None:
    for opened, keys, told in ranks.run(12, meet):
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
