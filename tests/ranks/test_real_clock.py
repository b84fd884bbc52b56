"""Modes with a server on real workers: one worker gets their bits from the log.

Other words beside them, and resumes after a kill, are in the matrix (`test_matrix.py`).
"""

import signal
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

import firecaffe
from firecaffe import Recipe, Result
from firecaffe.recipe.recorded_recipe import recipe_of
from firecaffe.runs.explain_modes import explain_served
from firecaffe.runs.rank_times import read_timings
from firecaffe.synchrony.events import Push
from firecaffe.training.modes.served.messages import ALIGNMENT
from firecaffe.training.verification import verify_run
from tests.kit.worlds import Trained, checkpoint_of
from tests.ranks.networks import Everything, small_data
from tests.ranks.served import (
    ALONE,
    MODES,
    TRAINING,
    check_replay,
    computed,
    events_of,
    fit_until_lost,
    given,
    recipe,
    sharded,
    synchrony,
)
from tests.world import Ranks

ASYNCHRONOUS = {"mode": "asynchronous"}


@pytest.mark.parametrize(
    ("name", "workers"), [*((name, 3) for name in MODES), ("again", 2), ("nesterov", 2)]
)
def test_a_replay_gives_the_same_bits(trained: Trained, name: str, workers: int) -> None:
    made = recipe(MODES[name])
    result = trained(workers, made, TRAINING)
    row = check_replay(result)
    assert len(row["pulled_bytes_by_learner"]) == workers * made.synchrony.in_flight
    served = explain_served(result.folder, read_timings(result.folder))
    assert served is not None
    assert sum(each.micro_batches for each in served.ranks) == row["gradients"]
    first = verify_run(result.folder, recipe_of(result.folder), ALONE, 5, given())
    assert (first.losses, first.tensors, first.weights) == (5, [3], [3, 5])
    assert row["gradients"] + row["dropped"] == computed(made)


def fit_and_ask(made: Recipe, folder: Path) -> tuple[Result, list[float]]:
    """What `train` returns on this rank, and its network's outputs."""
    result = TRAINING(made, folder)
    with torch.no_grad():
        return result, result.model.eval()(small_data(5, 3).inputs).flatten().tolist()


@pytest.mark.parametrize(
    ("words", "train"),
    [
        (MODES["again"], {}),
        (sharded("stale"), {}),
        (MODES["asynchronous"], {"batch_norm_samples": 40}),
    ],
    ids=["first", "sharded", "statistics estimated again"],
)
def test_all_ranks_have_the_result(
    ranks: Ranks, words: dict[str, Any], train: dict[str, Any], tmp_path: Path
) -> None:
    """And the network that was evaluated, as the folder has it."""
    run = tmp_path / "run"
    results = ranks.shared(3, fit_and_ask, recipe(words, train=train), run)
    found = [(asdict(result), outputs) for result, outputs in results]
    assert found == [found[0]] * 3
    with torch.no_grad():
        loaded = firecaffe.load(run, Everything)(small_data(5, 3).inputs)
    torch.testing.assert_close(loaded.flatten().tolist(), found[0][1])  # by more threads


def pushed_bytes(run: Path) -> dict[int, float]:
    """By rank, of one push."""
    pushes = Counter(event.work.learner for event in events_of(run) if isinstance(event, Push))
    found = synchrony(run)["pushed_bytes_by_learner"]
    return {learner: found[str(learner)] / count for learner, count in pushes.items()}


def test_what_is_pushed_is_encoded(trained: Trained) -> None:
    """In rows of 256 elements of 2 bytes; all else is the same."""
    plain = trained(3, recipe(ASYNCHRONOUS), TRAINING)
    encoded = trained(3, recipe({**ASYNCHRONOUS, "compressor": "float16"}), TRAINING)
    sizes = [each.numel() for each in Everything().parameters() if each.requires_grad]
    more = sum(-(-size // 256) * 512 - -(-4 * size // ALIGNMENT) * ALIGNMENT for size in sizes)
    before, found = pushed_bytes(plain.folder), pushed_bytes(encoded.folder)
    assert found == {0: 0, **{rank: before[rank] + more for rank in (1, 2)}}


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        *(("again", 3, 2), ("stale", 3, 2), ("softsync", 3, 2), ("encoded", 3, 2)),
        *(("nesterov", 1, 3), ("asynchronous", 1, 3), ("backup", 3, 2)),
    ],
)
def test_a_resume_on_other_workers_is_replayed(
    trained: Trained, name: str, first: int, second: int
) -> None:
    made = recipe(MODES[name])
    start = trained(first, made, TRAINING)
    row = check_replay(trained(second, made, TRAINING, checkpoint_of(start, 3)))
    assert row["lost_learners"] == first * made.synchrony.in_flight
    # The resumed part counts on.
    assert row["gradients"] + row["dropped"] == computed(made)


@pytest.mark.parametrize(
    ("name", "number"),
    [
        *(("again", signal.SIGKILL), ("stale", signal.SIGKILL)),
        *(("again", signal.SIGSTOP), ("encoded", signal.SIGSTOP)),
    ],
)
def test_a_lost_worker_ends_nobody(
    ranks: Ranks, name: str, number: signal.Signals, tmp_path: Path
) -> None:
    made = recipe(MODES[name], exchange={"silent_s": 2.0}, synchrony={"warm_steps": 0})
    result, other, _ = ranks.run(3, fit_until_lost, made, tmp_path / "run", number, lost={2})
    assert asdict(other) == asdict(result)
    row = check_replay(result)
    # A step with a backup waits for no frozen worker, so the training may end before it is found.
    fewest = 0 if made.synchrony.mode == "backup" else 1
    assert fewest <= row["lost_learners"] <= 1
    # Each sample of the training came once.
    assert row["gradients"] + row["dropped"] == computed(made)


def test_rank_0_goes_on_alone(ranks: Ranks, tmp_path: Path) -> None:
    made = recipe(MODES["softsync"])
    result, _ = ranks.run(2, fit_until_lost, made, tmp_path / "run", signal.SIGKILL, lost={1})
    row = check_replay(result)
    assert (row["lost_learners"], row["gradients"]) == (1, computed(made))
