"""What ends a training with a server ends it on all workers, with one line."""

import dataclasses
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from firecaffe import Recipe, SolverConfig
from tests.ranks.served import LOCKLESS, MODES, end_of, recipe, replayed, sharded
from tests.world import Ranks

SERVERS = {"first": MODES["asynchronous"], "sharded": sharded("asynchronous")}


@pytest.mark.parametrize("words", [*SERVERS.values(), LOCKLESS], ids=[*SERVERS, "lockless"])
def test_numbers_that_are_not_finite(ranks: Ranks, words: dict[str, Any], tmp_path: Path) -> None:
    made = recipe(tmp_path / "run", words)
    made = dataclasses.replace(made, solver=SolverConfig(base_lr=1e30))
    (kind, goes_along, line), other = ranks.run(2, end_of, made)
    assert (kind, goes_along) == ("NotFiniteError", False)
    assert "gradients of 2 learners come late" in line
    assert other == (kind, True, line)


def end_of_rise(made: Recipe) -> tuple[str, bool, str]:
    with patch("firecaffe.training.divergence.PATIENCE", 0):
        return end_of(made)


def test_a_loss_that_stays_above_its_start(ranks: Ranks, tmp_path: Path) -> None:
    made = recipe(tmp_path / "run", MODES["asynchronous"])
    (kind, goes_along, line), other = ranks.run(2, end_of_rise, made)
    assert (kind, goes_along) == ("DivergedError", False)
    assert "gradients of 2 learners come late" in line
    assert other == (kind, True, line)


@pytest.mark.parametrize("words", [MODES["nesterov"], sharded("nesterov")], ids=[*SERVERS])
def test_a_worker_that_is_asked_to_stop(
    ranks: Ranks, words: dict[str, Any], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    made = recipe(run, words, steps=1000, eval_every=0)
    (kind, goes_along, line), other = ranks.run(2, end_of, made, signal.SIGTERM)
    assert (kind, goes_along) == ("PreemptedError", True)
    assert "another rank was asked to" in line
    assert other == (kind, False, line)
    assert replayed(run).is_same
