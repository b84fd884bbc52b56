"""What tests of trainings on ranks share: those that one of them has done; one thread, as ranks."""

import pytest

from tests.kit.worlds import Trained
from tests.unit.parallel.conftest import one_thread
from tests.world import Ranks

__all__ = ["one_thread"]


@pytest.fixture(scope="session")
def trained(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(ranks, tmp_path_factory.mktemp("trained"))
