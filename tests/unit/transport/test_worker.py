"""The communication thread: in order, and nothing after a failure."""

import pytest

from firecaffe.errors import PeerLostError
from firecaffe.transport.worker import Worker


def test_tasks_run_in_order_and_nothing_runs_after_one_that_failed() -> None:
    done: list[int] = []

    def lose() -> None:
        raise PeerLostError("rank 1 went away")

    worker = Worker("test")
    before = worker.submit(lambda: done.append(1))
    failing = worker.submit(lose)
    after = worker.submit(lambda: done.append(2))
    worker.close()
    before.result()
    for future in (failing, after):
        with pytest.raises(PeerLostError, match="rank 1 went away"):
            future.result()
    assert done == [1]


def test_a_thread_that_cannot_begin_fails_what_it_is_given() -> None:
    def begin() -> None:
        raise OSError("no device")

    worker = Worker("test", begin)
    with pytest.raises(OSError, match="no device"):
        worker.submit(lambda: None).result(timeout=300)
    worker.close()
