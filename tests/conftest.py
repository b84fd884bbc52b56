"""What all tests share: small worlds of real ranks, and emulated clusters."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from benchmarks.namespaces import ClusterUnavailableError
from benchmarks.virtual_cluster import VirtualCluster
from tests.world import Ranks


@pytest.fixture(scope="session")
def ranks() -> Ranks:
    """Starts ranks for tests: `ranks.run(world_size, function, *arguments)`."""
    return Ranks()


@pytest.fixture
def cluster() -> Iterator[Callable[..., VirtualCluster]]:
    """Makes emulated clusters, with `VirtualCluster`'s arguments; they go when the test ends.

    The test is skipped where there can be none, as without root.
    """
    with ExitStack() as stack:

        def up(hosts: int, rate_bits_per_s: int, **options: Any) -> VirtualCluster:
            try:
                return stack.enter_context(VirtualCluster(hosts, rate_bits_per_s, **options))
            except ClusterUnavailableError as error:
                pytest.skip(str(error))

        yield up
