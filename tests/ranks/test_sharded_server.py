"""A server whose weights are cut among all ranks: one worker gets their bits from the log."""

import dataclasses
import os
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from firecaffe import Recipe, Result, SolverConfig
from firecaffe.data import Batch, Batches
from firecaffe.errors import FirecaffeError, NotFiniteError
from firecaffe.synchrony.events import Pull, Push
from firecaffe.training.served import server_memory
from firecaffe.training.served.coder import Coder
from firecaffe.training.served.messages import Parcel
from firecaffe.training.served.server_memory import bytes_in_file
from firecaffe.training.served.shards import owner
from firecaffe.training.served.shards.carrier import ASK, Head, Layout
from firecaffe.training.served.shards.weight_cuts import cut
from tests.ranks.networks import Everything
from tests.ranks.served import (
    MODES,
    events_of,
    fit,
    fit_and_digest,
    recipe,
    replayed,
    sharded,
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
        return own, ranks.shared(world_size, fit_and_digest, recipe(own, sharded(name)))

    return of


@pytest.mark.parametrize(("name", "world_size"), [*((name, 3) for name in MODES), ("stale", 2)])
def test_a_replay_gives_the_same_bits(run: Run, name: str, world_size: int) -> None:
    folder, [(result, outputs), *others] = run(name, world_size)
    for other, its_outputs in others:
        assert dataclasses.asdict(other) == dataclasses.asdict(result)
        assert its_outputs == outputs
    found = replayed(folder)
    assert found.is_same
    assert found.found.state == result.state_sha256


def test_its_moving_average_and_buffers_are_replayed(ranks: Ranks, tmp_path: Path) -> None:
    """With a solver of two states, and a rate that is not that of all parameters."""
    run = tmp_path / "run"
    made = recipe(run, {**sharded("softsync"), "warm_steps": 1})
    solver = SolverConfig(type="adamw", base_lr=0.01, lr_mult={"@vector": 2.0}, weight_decay=0.1)
    made = dataclasses.replace(
        made, solver=solver, train=dataclasses.replace(made.train, ema_decay=0.9)
    )
    (result, *_) = ranks.shared(3, fit, made)
    found = replayed(run)
    assert found.is_same
    assert found.found.state == result.state_sha256


WHOLE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "clip": ({"clip_gradients": 0.05}, {"mode": "stale", "max_staleness": 2, "in_flight": 2}),
    "lars": (
        {"type": "lars", "base_lr": 0.5, "clip_gradients": 0.05},
        {"mode": "asynchronous", "gradients_per_update": 2},
    ),
    "one_bit": ({}, {"mode": "backup", "backup_workers": 1, "compressor": "one_bit"}),
}
"""Words of the solver that take norms, or a codec that keeps something back, and a mode."""


@pytest.mark.parametrize("name", WHOLE)
def test_owners_of_whole_parameters_are_replayed(ranks: Ranks, name: str, tmp_path: Path) -> None:
    """And go on as two."""
    of_solver, mode = WHOLE[name]

    def words(folder: Path) -> Recipe:
        made = recipe(folder, {**mode, "server": "sharded"})
        return dataclasses.replace(made, solver=dataclasses.replace(made.solver, **of_solver))

    ranks.shared(3, fit, words(first := tmp_path / "first"))
    assert replayed(first).is_same
    saved = str(first / "checkpoints" / "step-00000003")
    (result, *_) = ranks.shared(2, fit, words(then := tmp_path / "then"), saved)
    found = replayed(then)
    assert found.is_same
    assert found.found.state == result.state_sha256


def fit_beyond(made: Recipe) -> str:
    """Rank 1 finds that the norm of its first gradient is beyond float32."""

    def norm_of(gradients: Sequence[Tensor], *_: Any, **__: Any) -> Tensor:
        return torch.tensor(torch.inf if os.environ["RANK"] == "1" else 1.0)

    with patch.object(torch.nn.utils, "get_total_norm", norm_of):
        try:
            fit(made)
        except NotFiniteError as error:
            return str(error)
    return "it went on"


def test_a_norm_beyond_float32_is_told_by_all(ranks: Ranks, tmp_path: Path) -> None:
    """Each gradient is finite, and so is the loss."""
    made = recipe(tmp_path / "run", {"mode": "asynchronous", "server": "sharded"})
    solver = dataclasses.replace(made.solver, clip_gradients=1.0)
    said = ranks.run(3, fit_beyond, dataclasses.replace(made, solver=solver))
    beyond = "the norm of the gradient is beyond float32"
    assert [beyond in str(each) for each in said] == [True] * 3, said


TO_SHARDS = (3, "first"), (2, "sharded")
FROM_SHARDS = (2, "sharded"), (3, "first")
OF_OTHERS = (2, "sharded"), (3, "sharded")


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        *((name, *OF_OTHERS) for name in MODES),
        *(("stale", *each) for each in (TO_SHARDS, FROM_SHARDS)),
        *(("nesterov", *each) for each in (TO_SHARDS, FROM_SHARDS)),
    ],
)
def test_a_resume_by_another_server_is_replayed(
    ranks: Ranks,
    run: Run,
    name: str,
    first: tuple[int, str],
    second: tuple[int, str],
    tmp_path: Path,
) -> None:
    start, folder = tmp_path / "start", tmp_path / "run"
    if first[1] == "sharded":
        start, _ = run(name, first[0])
    else:
        ranks.shared(first[0], fit, recipe(start, {**sharded(name), "server": first[1]}))
    checkpoint = start / "checkpoints" / "step-00000003"
    made = recipe(folder, {**sharded(name), "server": second[1]})
    (result, *_) = ranks.shared(second[0], fit, made, str(checkpoint))
    found = replayed(folder)
    assert found.is_same
    assert found.found.state == result.state_sha256
    row = synchrony(folder)
    assert row["lost_learners"] == first[0] * MODES[name].get("in_flight", 1)
    warm = 6 * MODES[name].get("warm_steps", 0)
    assert row["gradients"] + row["dropped"] == 25 + 18 - warm


@pytest.mark.parametrize("compressor", ["none", "float16"])
def test_its_bytes_are_those_of_the_events(ranks: Ranks, compressor: str, tmp_path: Path) -> None:
    """An ask brings the owner's part of the weights, a push its part of the gradient."""
    run = tmp_path / "run"
    words = {"mode": "asynchronous", "server": "sharded", "compressor": compressor}
    ranks.shared(3, fit, recipe(run, words))
    named = {name: p for name, p in Everything().named_parameters() if p.requires_grad}
    parcel = Parcel(named)
    parts = cut(parcel, 3)
    shards = gradients = [shard.nbytes for shard in parts]
    if compressor == "float16":  # each piece of a parameter in rows of 256 elements
        gradients = [sum(-(-len(run) // 256) * 512 for run in e.pieces.values()) for e in parts]
    head = Head(Layout(named, parcel, (), Coder(), clips=False)).fill(ASK).nbytes
    pushes, asks, last = Counter[int](), Counter[int](), dict[int, int]()
    for event in events_of(run):
        if isinstance(event, Push):
            pushes[event.work.learner] += 1
        elif isinstance(event, Pull):
            asks[event.work.learner] += last.get(event.work.learner) != event.work.version
            last[event.work.learner] = event.work.version
    expected = {}
    for rank, (own, pushed) in enumerate(zip(shards, gradients, strict=True)):
        others = [learner for learner in range(3) if learner != rank]
        sent = sum(asks[each] * own for each in others)
        received = sum(asks[each] * head + pushes[each] * (head + pushed) for each in others)
        expected[str(rank)] = [sent, received]
    row = synchrony(run)
    assert row["server_bytes_by_rank"] == expected
    assert row["pulled_bytes_by_learner"]["0"] == asks[0] * sum(shards[1:])
    heads = (asks[0] + pushes[0]) * 2 * head
    assert row["pushed_bytes_by_learner"]["0"] == heads + pushes[0] * sum(gradients[1:])


def fit_in_files(made: Recipe) -> tuple[Result, int]:
    """With no room in memory. Also how many versions this rank has had in files."""
    with (
        patch.object(server_memory, "MOST_BYTES", 0),
        patch.object(owner, "bytes_in_file", wraps=bytes_in_file) as in_file,
    ):
        return fit(made), in_file.call_count


def test_versions_that_memory_has_no_room_for_are_in_files(ranks: Ranks, tmp_path: Path) -> None:
    run = tmp_path / "run"
    results = ranks.run(2, fit_in_files, recipe(run, sharded("stale")))
    assert all(versions > 4 for _, versions in results)
    found = replayed(run)
    assert found.is_same
    assert found.found.state == results[0][0].state_sha256


def fit_until_saved(made: Recipe) -> Result:
    """The last rank is killed once there is a checkpoint."""
    latest = Path(made.run.folder) / "checkpoints" / "step-00000003"

    def take(batches: Batches, step: int, leaf: int) -> Batch:
        if int(os.environ["RANK"]) == 2 and latest.exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return take_now(batches, step, leaf)

    take_now = Batches.train_batch
    with patch.object(Batches, "train_batch", take):
        return fit(made)


def end_when_lost(made: Recipe) -> tuple[str, str]:
    try:
        fit_until_saved(made)
    except FirecaffeError as error:
        return type(error).__name__, str(error)
    return "", ""


def test_a_lost_owner_ends_all(ranks: Ranks, tmp_path: Path) -> None:
    """They say who it was, and the run goes on from its checkpoint."""
    run, again = tmp_path / "run", tmp_path / "again"
    made = recipe(run, sharded("softsync"), steps=40, eval_every=0)
    for end in ranks.run(3, end_when_lost, made, lost={2})[:2]:
        assert end is not None
        assert end[0] == "PeerLostError"
        assert "rank 2" in end[1]
    checkpoint = run / "checkpoints" / "step-00000003"
    rest = recipe(again, sharded("softsync"), steps=40, eval_every=0)
    ranks.shared(2, fit, rest, str(checkpoint))
    assert replayed(again).is_same
