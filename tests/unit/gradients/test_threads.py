"""Who starts a rank's exchanges: backward's own thread where a backend wants one order."""

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.distributed import ProcessGroup

from firecaffe.cluster.group import ORDERED, Group
from firecaffe.gradients.threads import ExchangeThreads
from firecaffe.transport.queue import CpuQueue

CPU = torch.device("cpu")


def threads_of(backend: str) -> ExchangeThreads:
    named = SimpleNamespace(name=lambda: backend)
    group = SimpleNamespace(_get_backend=lambda _: named)
    world = Group(0, 2, CPU, exchange_group=cast(ProcessGroup, group))
    return ExchangeThreads(world, 2, CPU, cast(Any, CpuQueue()))


@pytest.mark.parametrize("backend", [*ORDERED, "gloo"])
def test_a_backend_that_wants_one_order_has_that_of_the_program(backend: str) -> None:
    """In both lanes: what backward sends next comes after. Another goes on beside it, in order."""
    threads, here = threads_of(backend), threading.get_ident()
    may_go, calls = threading.Event(), list[tuple[int, bool]]()

    def exchange(number: int) -> None:
        is_here = threading.get_ident() == here
        assert is_here or may_go.wait(300)
        calls.append((number, is_here))

    for number in range(6):
        threads.submit(number, lambda number=number: exchange(number), [])  # type: ignore[misc]
        if backend in ORDERED:
            assert calls[-1] == (number, True)
    may_go.set()
    assert len(threads.finish()) == 6
    threads.close(wait=True)
    for lane in (0, 1):
        of_lane = [call for call in calls if call[0] % 2 == lane]
        assert of_lane == [(number, backend in ORDERED) for number in range(lane, 6, 2)]


@pytest.mark.parametrize("backend", [*ORDERED, "gloo"])
def test_an_error_is_told_at_the_end_of_the_step(backend: str) -> None:
    """Not in the middle of backward, and nothing is started in its lane after it."""
    threads, calls = threads_of(backend), list[int]()

    def fail() -> None:
        raise ArithmeticError("no luck")

    threads.submit(0, fail, [])
    threads.submit(2, lambda: calls.append(2), [])
    with pytest.raises(ArithmeticError, match="no luck"):
        threads.finish()
    threads.close(wait=True)
    assert not calls
