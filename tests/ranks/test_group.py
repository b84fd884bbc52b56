"""Groups of some ranks: a mesh whose rows and columns sum by themselves, beside the world."""

import os
from pathlib import Path
from threading import Thread

import pytest
import torch
import torch.distributed as dist

from firecaffe.cluster.agree import gather_text
from firecaffe.cluster.group import check_parts, divide
from firecaffe.cluster.process_settings import threads_stand_back
from firecaffe.cluster.world import World, join
from firecaffe.transport.exchange import Exchange
from firecaffe.transport.local_ranks import meet_local_ranks
from tests.world import Ranks

ROWS, COLUMNS = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
BACKWARDS = [[3, 1, 0], [2]]


def sums_by_all(algorithms: list[str]) -> dict[str, dict[str, tuple[float, list[str]]]]:
    with join("cpu") as world:
        return {algorithm: sums(world, algorithm) for algorithm in algorithms}


def sums(world: World, algorithm: str) -> dict[str, tuple[float, list[str]]]:
    """What this rank gets of the sum of ranks' powers of ten, and who is with it, in each group."""
    found = {}
    parts = {"rows": ROWS, "columns": COLUMNS, "backwards": BACKWARDS}
    for name, each in parts.items():
        with divide(world, each) as group:
            vector = torch.full((13,), 10.0**world.rank)
            Exchange.of_vectors(group, algorithm).all_reduce(vector)
            assert (vector == vector[0]).all()
            found[name] = float(vector[0]), gather_text(group, str(world.rank))
    with divide(world, ROWS) as row, divide(world, COLUMNS) as column:
        vector = torch.full((8,), 10.0**world.rank)
        for group in (row, column):  # in one order on all ranks
            Exchange.of_vectors(group, algorithm).all_reduce(vector)
        found["both"] = float(vector[0]), []
    return found


def test_rows_and_columns_of_a_mesh(ranks: Ranks) -> None:
    for rank, by_algorithm in enumerate(ranks.shared(4, sums_by_all, ["tree", "ring", "native"])):
        for algorithm, found in by_algorithm.items():
            for name, parts in {"rows": ROWS, "columns": COLUMNS, "backwards": BACKWARDS}.items():
                own = next(part for part in parts if rank in part)
                expected = sum(10.0**each for each in own), [str(each) for each in own]
                assert found[name] == expected, algorithm
            assert found["both"][0] == 1111.0, algorithm


def policies() -> list[list[int]]:
    """How the kernel schedules Gloo's threads: a world's, with a script's, and with a row's."""
    with join("cpu") as world:
        found = [of_gloo()]
        theirs = dist.new_group(backend="gloo")
        found.append(of_gloo())
        with divide(world, ROWS):
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
    with threads_stand_back():
        begun = Thread(target=lambda: None)
        begun.start()
    begun.join()


def sum_in_memory() -> float:
    with join("cpu") as world, divide(world, COLUMNS) as group:
        local = meet_local_ranks(group, 300.0)
        assert local is not None
        exchange = Exchange.of_vectors(group, "tree", local)
        vector = exchange.empty(70_001, torch.float32, torch.device("cpu"))
        vector.fill_(10.0**world.rank)
        exchange.all_reduce(vector)
        assert (vector == vector[0]).all()
        total = float(vector[0])
        exchange.close()
        return total


def test_a_group_on_one_host_adds_in_its_memory(ranks: Ranks) -> None:
    assert ranks.shared(4, sum_in_memory) == [101.0, 1010.0, 101.0, 1010.0]


@pytest.mark.parametrize("parts", [[[0, 1]], [[0, 1], [1, 2]], [[0, 1, 2], []], [[0, 1, 3]]])
def test_parts_hold_each_rank_once(parts: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="each of 3 ranks once"):
        check_parts(3, parts)
