"""Groups of some ranks, beside the world."""

import os
from pathlib import Path
from threading import Thread

import pytest
import torch
import torch.distributed as dist

from firecaffe.cluster.agree import gather_text
from firecaffe.cluster.group import check_parts, divide
from firecaffe.cluster.process_settings import non_preempting_threads
from firecaffe.cluster.world import World, join
from firecaffe.transport.exchange import Exchange
from tests.world import Ranks

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


def test_where_a_container_forbids_it_threads_begin_as_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forbidden(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.sched_setscheduler", forbidden)
    with non_preempting_threads():
        begun = Thread(target=lambda: None)
        begun.start()
    begun.join()


@pytest.mark.parametrize("parts", [[[0, 1]], [[0, 1], [1, 2]], [[0, 1, 2], []], [[0, 1, 3]]])
def test_parts_hold_each_rank_once(parts: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="each of 3 ranks once"):
        check_parts(3, parts)
