"""What the bare loops are compared with runs with one thread."""

from tests.unit.parallel.conftest import one_thread

__all__ = ["one_thread"]
