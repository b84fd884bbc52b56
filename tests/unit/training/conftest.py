"""One thread, as each rank has: on networks this small, threads wait for each other."""

from tests.unit.parallel.conftest import one_thread

__all__ = ["one_thread"]
