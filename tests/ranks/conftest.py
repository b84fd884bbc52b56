"""What tests of trainings on ranks share: those that one of them has done."""

import pytest

from tests.kit.worlds import Trained
from tests.world import Ranks


@pytest.fixture(scope="session")
def trained(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(ranks, tmp_path_factory.mktemp("trained"))
