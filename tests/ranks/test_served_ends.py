"""What ends a training with a server ends it on all workers, with one line."""

import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from firecaffe import Recipe, SolverConfig
from firecaffe.errors import FirecaffeError
from tests.ranks.served import LOCKLESS, MODES, fit_until_lost, recipe, replayed, sharded
from tests.world import Ranks

SERVERS = {"first": MODES["asynchronous"], "sharded": sharded("asynchronous")}
LATE = "gradients of 2 learners come late"


def end_of(
    made: Recipe, folder: Path, number: int = 0, patience: int = 100
) -> tuple[str, bool, str]:
    """What `train` raises: its kind, whether it goes along with another rank's, and its words."""
    try:
        with patch("firecaffe.training.divergence.PATIENCE", patience):
            fit_until_lost(made, folder, number)
    except FirecaffeError as error:
        return type(error).__name__, error.goes_along, str(error)
    return "", False, ""


@pytest.mark.parametrize("words", [*SERVERS.values(), LOCKLESS], ids=[*SERVERS, "lockless"])
def test_numbers_that_are_not_finite(ranks: Ranks, words: dict[str, Any], tmp_path: Path) -> None:
    made = recipe(words, solver=SolverConfig(base_lr=1e30))
    first, other = ranks.run(2, end_of, made, tmp_path / "run")
    kind, goes_along, line = first
    assert (kind, goes_along) == ("NotFiniteError", False)
    assert LATE in line
    assert other == (kind, True, line)


def test_a_loss_that_stays_above_its_start(ranks: Ranks, tmp_path: Path) -> None:
    first, other = ranks.run(2, end_of, recipe(MODES["asynchronous"]), tmp_path / "run", 0, 0)
    kind, goes_along, line = first
    assert (kind, goes_along) == ("DivergedError", False)
    assert LATE in line
    assert other == (kind, True, line)


@pytest.mark.parametrize("words", [MODES["nesterov"], sharded("nesterov")], ids=[*SERVERS])
def test_a_worker_that_is_asked_to_stop(
    ranks: Ranks, words: dict[str, Any], tmp_path: Path
) -> None:
    made = recipe(words, train={"steps": 1000, "eval_every": 0})
    first, other = ranks.run(2, end_of, made, tmp_path / "run", signal.SIGTERM)
    kind, goes_along, line = first
    assert (kind, goes_along) == ("PreemptedError", True)
    assert "another rank was asked to" in line
    assert other == (kind, False, line)
    assert replayed(tmp_path / "run").is_same
