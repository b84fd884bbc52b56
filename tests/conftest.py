"""What all tests share: small worlds of real ranks, and emulated clusters."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest
from hypothesis import settings

from benchmarks.namespaces import ClusterUnavailableError
from benchmarks.virtual_cluster import VirtualCluster
from tests.world import Ranks

# How long an example takes says how busy the machine is.
settings.register_profile("firecaffe", deadline=None)
settings.load_profile("firecaffe")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Ranks for tests: `ranks.shared(world_size, function, *arguments)`, or `run` on new ones."""
    with closing(Ranks()) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def can_emulate() -> None:
    """Skips where no cluster can be emulated, as without root. Where one could, the next must."""
    try:
        with VirtualCluster(1, 1_000_000_000):
            pass
    except ClusterUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture
def cluster(can_emulate: None) -> Iterator[Callable[..., VirtualCluster]]:
    """Makes emulated clusters, with `VirtualCluster`'s arguments; they go when the test ends."""
    with ExitStack() as stack:

        def up(hosts: int, rate_bits_per_s: int, **options: Any) -> VirtualCluster:
            return stack.enter_context(VirtualCluster(hosts, rate_bits_per_s, **options))

        yield up
