"""What ends a training with a server ends it on all workers, with one line; a lost worker does not
end it.
"""

import signal
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from firecaffe import Recipe, SolverConfig
from firecaffe.errors import FirecaffeError
from tests.ranks.served import (
    LOCKLESS,
    MODES,
    check_replay,
    computed,
    fit_until_lost,
    recipe,
    replayed,
    sharded,
    synchrony,
)
from tests.world import Ranks

SERVERS = {"first": MODES["asynchronous"], "sharded": sharded("asynchronous"), "lockless": LOCKLESS}
LATE = "gradients of 2 learners come late"


def end_of(
    made: Recipe, folder: Path, number: int = 0, patience: int = 100
) -> tuple[str, bool, str]:
    """What `train` raises: its kind, whether it goes along with another rank's, and its words."""
    try:
        with patch("firecaffe.training.divergence.PATIENCE", patience):
            fit_until_lost(made, folder, number)
    except FirecaffeError as error:
        return type(error).__name__, error.is_secondary, str(error)
    return "", False, ""


@pytest.mark.parametrize(
    ("words", "rate", "patience", "kind"),
    [
        *((words, 1e30, 100, "NotFiniteError") for words in SERVERS.values()),
        (MODES["asynchronous"], 0.05, 0, "DivergedError"),
    ],
    ids=[*SERVERS, "a loss that stays above its start"],
)
def test_a_training_that_diverges(
    ranks: Ranks, words: dict[str, Any], rate: float, patience: int, kind: str, tmp_path: Path
) -> None:
    made = recipe(words, solver=SolverConfig(base_lr=rate))
    first, other = ranks.shared(2, end_of, made, tmp_path / "run", 0, patience)
    assert first[:2] == (kind, False)
    assert LATE in first[2]
    assert other == (kind, True, first[2])


@pytest.mark.parametrize("words", [MODES["nesterov"], sharded("nesterov")], ids=[*SERVERS][:2])
def test_a_worker_that_is_asked_to_stop(
    ranks: Ranks, words: dict[str, Any], tmp_path: Path
) -> None:
    made = recipe(words, train={"steps": 1000, "eval_every": 0})
    first, other = ranks.shared(2, end_of, made, tmp_path / "run", signal.SIGTERM)
    assert first[:2] == ("PreemptedError", True)
    assert "another rank was asked to" in first[2]
    assert other == ("PreemptedError", False, first[2])
    assert replayed(tmp_path / "run").is_same


@pytest.mark.parametrize(
    ("words", "number", "workers"),
    [
        (MODES["stale"], signal.SIGKILL, 3),
        (MODES["again"], signal.SIGSTOP, 3),
        (MODES["softsync"], signal.SIGKILL, 2),
        (LOCKLESS, signal.SIGKILL, 3),
        (LOCKLESS, signal.SIGSTOP, 3),
    ],
    ids=["killed", "frozen", "rank 0 is left alone", "lockless killed", "lockless frozen"],
)
def test_a_lost_worker_ends_nobody(
    ranks: Ranks, words: dict[str, Any], number: int, workers: int, tmp_path: Path
) -> None:
    made = recipe(words, exchange={"silent_s": 2.0}, synchrony={"warm_steps": 0})
    run, last = tmp_path / "run", workers - 1
    result, *others = ranks.shared(workers, fit_until_lost, made, run, number, lost={last})
    assert all(asdict(other) == asdict(result) for other in others[:-1])
    row = synchrony(run) if words is LOCKLESS else check_replay(result)
    # A step with a backup waits for no frozen worker, so the training may end before it is found.
    fewest = 0 if made.synchrony.mode == "backup" else 1
    assert fewest <= row["lost_learners"] <= 1
    # Each sample of the training came once.
    assert row["gradients"] + row.get("dropped", 0) == computed(made)
