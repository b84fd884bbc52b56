"""The order in which a rank starts its exchanges and what backward itself sends."""

import threading
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.distributed import ProcessGroup

from firecaffe.cluster import group as group_module
from firecaffe.cluster.group import ORDERED, Group
from firecaffe.gradients.threads import ExchangeThreads
from firecaffe.transport.queue import CpuQueue

CPU = torch.device("cpu")
STEPS, BUCKETS, SCHEDULES = 3, 4, 20


class Backend:
    """Two groups of one rank, its row and its column, which note their calls in one list."""

    def __init__(self, name: str, random: Random) -> None:
        self.calls: list[tuple[str, int]] = []
        self._random, self._changed = random, threading.Condition()
        self._in_row = self._in_column = 0
        self._due: list[int] = []
        self._is_last_row = False
        found = SimpleNamespace(name=lambda: name)
        column = SimpleNamespace(_get_backend=lambda _: found)
        self.world = Group(0, 2, CPU, exchange_group=cast(ProcessGroup, column))

    def row(self, number: int) -> None:
        """A call in the row, after those in the column that the schedule has before it."""
        with self._changed:
            before = sum(due <= self._in_row for due in self._due)
            self._changed.wait_for(lambda: self._in_column >= before)
            self.calls.append(("row", number))
            self._in_row += 1
            self._changed.notify_all()

    def submit(self, threads: ExchangeThreads, number: int) -> None:
        """A call in the column; in a thread of its own it comes after some more in the row."""
        due, here = (
            self._random.randint(self._in_row, self._in_row + BUCKETS),
            threading.get_ident(),
        )
        last = self._due[-1] if self._due else 0

        def work() -> None:
            with self._changed:
                if threading.get_ident() != here:
                    self._changed.wait_for(lambda: self._in_row >= due or self._is_last_row)
                self.calls.append(("column", number))
                self._in_column += 1
                self._changed.notify_all()

        threads.submit(number, work, [])
        self._due.append(max(due, last))

    def backward(self) -> list[tuple[str, int]]:
        """Steps in which a call in the row stands before each bucket, and one after all."""
        threads = ExchangeThreads(self.world, 1, CPU, cast(Any, CpuQueue()))
        for _ in range(STEPS):
            self._is_last_row = False
            for number in range(BUCKETS):
                self.row(number)
                self.submit(threads, number)
            self.row(BUCKETS)
            with self._changed:
                self._is_last_row = True
                self._changed.notify_all()
            threads.finish()
        threads.close(wait=True)
        return self.calls


def orders(name: str) -> list[list[tuple[str, int]]]:
    """Of ranks whose threads run by other schedules."""
    return [Backend(name, Random(seed)).backward() for seed in range(SCHEDULES)]


@pytest.mark.parametrize("name", ORDERED)
def test_a_backend_that_wants_one_order_has_that_of_the_program(name: str) -> None:
    in_step = [(kind, n) for n in range(BUCKETS) for kind in ("row", "column")]
    assert orders(name) == [[*in_step, ("row", BUCKETS)] * STEPS] * SCHEDULES


def test_another_backend_goes_on_beside_the_row() -> None:
    """So its orders differ: the test sees what would be wrong with the others."""
    found = orders("gloo")
    assert any(each != found[0] for each in found)
    for each in found:
        assert [n for kind, n in each if kind == "column"] == [*range(BUCKETS)] * STEPS


def test_an_error_is_told_at_the_end_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in the middle of backward, and nothing is started after it."""
    monkeypatch.setattr(group_module, "ORDERED", ("fake",))
    backend = Backend("fake", Random(0))
    threads = ExchangeThreads(backend.world, 1, CPU, cast(Any, CpuQueue()))

    def fail() -> None:
        raise ArithmeticError("no luck")

    threads.submit(0, fail, [])
    threads.submit(1, lambda: backend.row(1), [])
    with pytest.raises(ArithmeticError, match="no luck"):
        threads.finish()
    threads.close(wait=True)
    assert not backend.calls
