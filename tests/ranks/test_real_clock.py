"""Modes with a server on real workers: one worker gets their bits from the log.

Other words beside them, and resumes after a kill, are in the matrix (`test_matrix.py`).
"""

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
from firecaffe.training.modes.served.server_memory import ALIGNMENT
from firecaffe.training.verification import verify_run
from tests.kit.training import ALONE
from tests.kit.worlds import Trained, checkpoint_of
from tests.ranks.networks import Everything, small_data
from tests.ranks.served import (
    MODES,
    TRAINING,
    check_replay,
    computed,
    events_of,
    given,
    recipe,
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
    first = verify_run(result.folder, recipe_of(result.folder), ALONE, 5, given())
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
    """What `train` returns on this rank, and its network's outputs."""
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
    """By rank, of one push."""
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
