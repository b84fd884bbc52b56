"""What all tests share: small worlds of real ranks."""

import pytest

from tests.world import Ranks


@pytest.fixture(scope="session")
def ranks() -> Ranks:
    """Starts ranks for tests: `ranks.run(world_size, function, *arguments)`."""
    return Ranks()
