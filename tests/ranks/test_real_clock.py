"""Modes with a server on real workers: they learn, and one worker gets their bits from the log."""

import dataclasses
import signal
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import median

import pytest

from firecaffe import CheckpointConfig, ExchangeConfig, Recipe, Result
from firecaffe.recipe.recorded_recipe import recipe_of
from firecaffe.runs.explain_served import explain_served
from firecaffe.runs.rank_times import read_timings
from firecaffe.synchrony.events import Push
from firecaffe.training.served.messages import ALIGNMENT
from firecaffe.training.verification import verify_run
from tests.ranks.networks import Everything
from tests.ranks.served import (
    ALONE,
    MODES,
    events_of,
    fit,
    fit_and_digest,
    fit_corners,
    fit_until_lost,
    given,
    recipe,
    replayed,
    synchrony,
)
from tests.world import Ranks

Run = Callable[[str, int], tuple[Path, list[tuple[Result, list[float]]]]]


@pytest.fixture(scope="module")
def run(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The folder of a run of one of MODES on so many ranks, trained once, and what each rank has
    come to.
    """
    folder = tmp_path_factory.mktemp("runs")

    @cache
    def of(name: str, world_size: int) -> tuple[Path, list[tuple[Result, list[float]]]]:
        own = folder / f"{name} {world_size}"
        return own, ranks.shared(world_size, fit_and_digest, recipe(own, MODES[name]))

    return of


@pytest.mark.parametrize(
    ("name", "world_size"), [*((name, 3) for name in MODES), ("again", 2), ("nesterov", 2)]
)
def test_a_replay_gives_the_same_bits(run: Run, name: str, world_size: int) -> None:
    folder, [(result, outputs), *others] = run(name, world_size)
    for other, its_outputs in others:
        assert dataclasses.asdict(other) == dataclasses.asdict(result)
        assert its_outputs == outputs
    found = replayed(folder)
    assert found.is_same
    assert found.found.state == result.state_sha256
    row = synchrony(folder)
    learners = world_size * MODES[name].get("in_flight", 1)
    assert len(row["pulled_bytes_by_learner"]) == learners
    told = explain_served(folder, read_timings(folder))
    assert told is not None
    assert sum(each.micro_batches for each in told.ranks) == row["gradients"]
    first = verify_run(folder, recipe_of(folder), ALONE, 5, given())
    assert (first.losses, first.tensors, first.weights) == (5, [3], [3, 5])
    # An epoch is 25 micro-batches in 5 steps; warm steps have theirs.
    warm = 6 * MODES[name].get("warm_steps", 0)
    assert row["gradients"] + row["dropped"] == 25 + 18 - warm


def pushed_bytes(run: Path) -> dict[int, float]:
    """By rank, of one push."""
    pushes = Counter(event.work.learner for event in events_of(run) if isinstance(event, Push))
    found = synchrony(run)["pushed_bytes_by_learner"]
    return {learner: found[str(learner)] / count for learner, count in pushes.items()}


def test_what_is_pushed_is_encoded(ranks: Ranks, tmp_path: Path) -> None:
    """In rows of 256 elements of 2 bytes; all else is the same."""
    plain, encoded = tmp_path / "plain", tmp_path / "encoded"
    ranks.shared(3, fit, recipe(plain, {"mode": "asynchronous"}))
    ranks.shared(3, fit, recipe(encoded, {"mode": "asynchronous", "compressor": "float16"}))
    sizes = [each.numel() for each in Everything().parameters() if each.requires_grad]
    more = sum(-(-size // 256) * 512 - -(-4 * size // ALIGNMENT) * ALIGNMENT for size in sizes)
    before, found = pushed_bytes(plain), pushed_bytes(encoded)
    assert found == {0: 0, **{rank: before[rank] + more for rank in (1, 2)}}


@pytest.mark.parametrize("name", ["stale", "asynchronous", "nesterov", "encoded"])
def test_it_learns(ranks: Ranks, name: str, tmp_path: Path) -> None:
    """The loss falls from guessing's, 1.39. All modes do so by the simulated clock (tests/unit)."""
    made = recipe(tmp_path / "run", MODES[name], steps=50, eval_every=0)
    made = dataclasses.replace(made, checkpoint=CheckpointConfig())
    (result, *_) = ranks.shared(2, fit_corners, made)
    losses = [row["loss"] for row in result.history if row["kind"] == "train"]
    assert losses[0] > 0.95  # of five updates
    # The middle one: BatchNorm over four samples is noise, and who comes late is chance.
    assert median(losses[-20:]) < 0.75
    assert result.top1 > 0.9


@pytest.mark.parametrize("name", MODES)
def test_a_resume_on_fewer_workers_is_replayed(
    ranks: Ranks, run: Run, name: str, tmp_path: Path
) -> None:
    start, _ = run(name, 3)
    check_a_resume(ranks, start, 3, 2, recipe(tmp_path / "run", MODES[name]))


@pytest.mark.parametrize("name", MODES)
def test_a_resume_on_more_workers_is_replayed(ranks: Ranks, name: str, tmp_path: Path) -> None:
    words, start = MODES[name], tmp_path / "start"
    if words.get("backup_workers", words.get("gradients_per_update", 1)) > 0:
        words = {**words, "in_flight": 2}
    ranks.shared(1, fit, recipe(start, words))
    check_a_resume(ranks, start, 1, 3, recipe(tmp_path / "run", words))


def check_a_resume(ranks: Ranks, start: Path, first: int, second: int, made: Recipe) -> None:
    """Of a run on `first` ranks by `second`."""
    words, run = made.synchrony, Path(made.run.folder)
    checkpoint = start / "checkpoints" / "step-00000003"
    (result, *_) = ranks.shared(second, fit, made, str(checkpoint))
    found = replayed(run)
    assert found.is_same
    assert found.found.state == result.state_sha256
    row = synchrony(run)
    assert row["lost_learners"] == first * words.in_flight
    # The resumed part counts on.
    warm = 6 * words.warm_steps
    assert row["gradients"] + row["dropped"] == 25 + 18 - warm


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
@pytest.mark.parametrize("name", ["again", "stale", "encoded"])
def test_a_lost_worker_ends_nobody(
    ranks: Ranks, name: str, number: signal.Signals, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    words = {word: value for word, value in MODES[name].items() if word != "warm_steps"}
    made = recipe(run, words)
    made = dataclasses.replace(made, exchange=ExchangeConfig(silent_s=2.0))
    result, other, _ = ranks.run(3, fit_until_lost, made, number, lost={2})
    assert dataclasses.asdict(other) == dataclasses.asdict(result)
    row = synchrony(run)
    # A step with a backup waits for no frozen worker, so the training may end before it is found.
    fewest = 0 if words["mode"] == "backup" else words.get("in_flight", 1)
    assert fewest <= row["lost_learners"] <= words.get("in_flight", 1)
    # Each sample of the training came once.
    assert row["gradients"] + row["dropped"] == 25 + 18
    found = replayed(run)
    assert found.is_same
    assert found.found.state == result.state_sha256


def test_rank_0_goes_on_alone(ranks: Ranks, tmp_path: Path) -> None:
    run = tmp_path / "run"
    made = recipe(run, MODES["softsync"])
    result, _ = ranks.run(2, fit_until_lost, made, signal.SIGKILL, lost={1})
    row = synchrony(run)
    assert (row["lost_learners"], row["gradients"]) == (1, 25 + 18)
    found = replayed(run)
    assert found.is_same
    assert found.found.state == result.state_sha256
