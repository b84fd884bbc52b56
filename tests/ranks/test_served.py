"""Modes with a server on real workers: one worker gets their bits from the log, and what ends one
worker ends all with one line; but for a lost one.

Other words beside them, and resumes after a kill, are in the matrix (`test_matrix.py`).
"""

import signal
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import firecaffe
from firecaffe import Recipe, Result, SolverConfig
from firecaffe.errors import FirecaffeError
from firecaffe.recipe.checked_recipe import recipe_of_run
from firecaffe.runs.explain_modes import explain_served
from firecaffe.runs.rank_times import read_timings
from firecaffe.synchrony.events import Push
from firecaffe.training.checkpoint import load_checkpoint
from firecaffe.training.modes.served.server_memory import ALIGNMENT
from firecaffe.training.verification import verify_run
from tests.kit.training import ALONE
from tests.kit.worlds import Trained, checkpoint_of
from tests.ranks.networks import Everything, small_data
from tests.ranks.served import (
    LOCKLESS,
    MODES,
    TRAINING,
    check_replay,
    computed,
    events_of,
    fit_until_lost,
    given,
    recipe,
    replayed,
    sharded,
    synchrony,
)
from tests.world import Ranks


@pytest.mark.parametrize(("name", "workers"), [("again", 3), ("softsync", 3), ("nesterov", 2)])
def test_a_replay_gives_the_same_bits(trained: Trained, name: str, workers: int) -> None:
    made = recipe(MODES[name])
    result = trained(workers, made, TRAINING)
    row = check_replay(result)
    assert len(row["pulled_bytes_by_learner"]) == workers * made.synchrony.in_flight
    served = explain_served(result.folder, read_timings(result.folder))
    assert served is not None
    assert sum(rank.micro_batches for rank in served.ranks) == row["gradients"]
    first = verify_run(result.folder, recipe_of_run(result.folder), ALONE, 5, given())
    assert (first.losses, first.tensors, first.weights) == (5, [3], [3, 5])
    assert row["gradients"] + row["dropped"] == computed(made)


@pytest.mark.parametrize(("name", "before", "now"), [("softsync", 3, 2), ("nesterov", 1, 3)])
def test_a_resume_on_other_workers_is_replayed(
    trained: Trained, name: str, before: int, now: int
) -> None:
    made = recipe(MODES[name])
    start = checkpoint_of(trained(before, made, TRAINING), 3)
    row = check_replay(trained(now, made, TRAINING, start))
    assert row["lost_learners"] == before * made.synchrony.in_flight
    # The resumed part counts on.
    assert row["gradients"] + row["dropped"] == computed(made)


def fit_and_ask(made: Recipe, folder: Path) -> tuple[Result, list[float]]:
    result = TRAINING(made, folder)
    with torch.no_grad():
        return result, result.model.eval()(small_data(5, 3).inputs).flatten().tolist()


@pytest.mark.parametrize("words", [MODES["again"], sharded("stale")], ids=["first", "sharded"])
def test_all_ranks_have_the_network_that_was_evaluated(
    ranks: Ranks, words: dict[str, Any], tmp_path: Path
) -> None:
    """As the folder has it; of the server in parts with statistics that are estimated again."""
    run, is_sharded = tmp_path / "run", "server" in words
    made = recipe(words, train={"batch_norm_samples": 40 * is_sharded})
    results = ranks.shared(3, fit_and_ask, made, run)
    first, *others = [(asdict(result), outputs) for result, outputs in results]
    assert others == [first] * 2
    with torch.no_grad():
        loaded = firecaffe.load(run, Everything)(small_data(5, 3).inputs)
    torch.testing.assert_close(loaded.flatten().tolist(), first[1])  # by more threads


def pushed_bytes(run: Path) -> dict[int, float]:
    pushes = Counter(event.work.learner for event in events_of(run) if isinstance(event, Push))
    total = synchrony(run)["pushed_bytes_by_learner"]
    return {learner: total[str(learner)] / count for learner, count in pushes.items()}


def test_what_is_pushed_is_encoded(trained: Trained) -> None:
    """In rows of 256 elements of 2 bytes; all else is the same."""
    words = {"mode": "asynchronous"}
    plain = trained(3, recipe(words), TRAINING)
    encoded = trained(3, recipe({**words, "compressor": "float16"}), TRAINING)
    sizes = [weight.numel() for weight in Everything().parameters() if weight.requires_grad]
    more = sum(-(-size // 256) * 512 - -(-4 * size // ALIGNMENT) * ALIGNMENT for size in sizes)
    before, after = pushed_bytes(plain.folder), pushed_bytes(encoded.folder)
    assert after == {0: 0, **{rank: before[rank] + more for rank in (1, 2)}}


class Times(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Steep(Everything):
    """The same values, and gradients that overflow between two factors."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("head", nn.Sequential(Times(2.0**-10), Times(2.0**10), self.head))


STEEP = replace(TRAINING, network=Steep)


def scale_at(result: Result, step: int) -> float:
    return float(load_checkpoint(checkpoint_of(result, step)).numbers["scaler"]["scale"])


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("stale", {}),
        ("softsync", {}),
        ("asynchronous", {"compressor": "top_k", "compensate": "gap"}),
    ],
    ids=["stale", "softsync", "top_k"],
)
@pytest.mark.parametrize("servers", [("first", "sharded"), ("sharded", "first")])
def test_a_loss_scale_is_replayed(
    trained: Trained, name: str, more: dict[str, Any], servers: tuple[str, str]
) -> None:
    """On three, and on two that go on with another server. Gradients overflow."""
    made, later = (
        recipe({**MODES[name], **more, "server": server}, train={"autocast": "float16"})
        for server in servers
    )
    first = trained(3, made, STEEP)
    check_replay(first, Steep)
    start = checkpoint_of(first, 3)
    second = trained(2, later, STEEP, start)
    check_replay(second, Steep)
    assert 1 <= scale_at(second, 8) <= scale_at(first, 3) < 2**16


SERVERS = {"first": MODES["asynchronous"], "sharded": sharded("asynchronous"), "lockless": LOCKLESS}
LATE = "gradients of 2 learners come late"


def end_of(
    made: Recipe, folder: Path, number: int = 0, patience: int = 100
) -> tuple[str, bool, str]:
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
