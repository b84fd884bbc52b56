"""The recipe that mistakes are made in; no rank may be started."""

from functools import cache, partial
from pathlib import Path

import pytest

from firecaffe.data.generated import generate
from tests.cli.mistakes.line import GOOD

generate_once = cache(partial(generate, 0, 1000, 100))
"""Made once, and few: most of the commands here would make all of them anew."""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(GOOD)
    return path


@pytest.fixture(autouse=True)
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake that can be known beforehand is found before any rank is started."""

    def refuse(*_: object) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr("firecaffe.cluster.agent.FaultAgent.run", refuse)
    monkeypatch.setattr("firecaffe.data.sources.generate", generate_once)
