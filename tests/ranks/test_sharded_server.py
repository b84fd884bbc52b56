"""A server whose weights are cut among all ranks: one worker gets their bits from the log."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from firecaffe import Recipe, Result, SolverConfig
from firecaffe.cluster.agree import gather_text
from firecaffe.cluster.world import join
from firecaffe.synchrony.events import Pull, Push
from firecaffe.training.checkpoint import load_checkpoint
from firecaffe.training.modes.served import owner, server_memory
from firecaffe.training.modes.served.coder import Coder
from firecaffe.training.modes.served.owner import cut
from firecaffe.training.modes.served.owner_messages import ASK, OwnerHead, OwnerLayout
from firecaffe.training.modes.served.owners import TELL, OwnerLines
from firecaffe.training.modes.served.server_memory import Parcel, bytes_in_file
from firecaffe.transport.lane import store_of
from tests.kit.worlds import Trained, checkpoint_of
from tests.ranks.killed import killed
from tests.ranks.networks import Everything
from tests.ranks.served import (
    MODES,
    TRAINING,
    check_replay,
    computed,
    events_of,
    recipe,
    sharded,
    synchrony,
)
from tests.world import Ranks


@pytest.mark.parametrize("name", ["again", "softsync", "encoded", "nesterov"])
def test_a_replay_gives_the_same_bits(trained: Trained, name: str) -> None:
    """On three, and on two that go on."""
    made = recipe(sharded(name))
    first = trained(3, made, TRAINING)
    check_replay(first)
    row = check_replay(trained(2, made, TRAINING, checkpoint_of(first, 3)))
    assert row["lost_learners"] == 3 * made.synchrony.in_flight
    assert row["gradients"] + row["dropped"] == computed(made)


@pytest.mark.parametrize(
    ("name", "servers"),
    [("stale", ("first", "sharded")), ("nesterov", ("sharded", "first"))],
    ids=["into parts", "out of parts"],
)
def test_a_resume_by_another_server_is_replayed(
    trained: Trained, name: str, servers: tuple[str, str]
) -> None:
    before, now = (recipe(MODES[name], synchrony={"server": server}) for server in servers)
    start = checkpoint_of(trained(3, before, TRAINING), 3)
    row = check_replay(trained(2, now, TRAINING, start))
    assert row["gradients"] + row["dropped"] == computed(now)


def test_its_moving_average_and_buffers_are_replayed(trained: Trained) -> None:
    """With a solver of two states, and a rate that is not that of all parameters."""
    solver = SolverConfig(type="adamw", base_lr=0.01, lr_mult={"@vector": 2.0}, weight_decay=0.1)
    words = {**sharded("softsync"), "warm_steps": 1}
    check_replay(trained(3, recipe(words, solver=solver, train={"ema_decay": 0.9}), TRAINING))


def test_a_checkpoint_has_the_mean_step_of_all_updates(trained: Trained) -> None:
    """Owners of whole parameters, of which each has a gap, go on as two."""
    made = recipe(sharded("softsync"), synchrony={"compensate": "gap"})
    first = trained(3, made, TRAINING)
    check_replay(first)
    saved = checkpoint_of(first, 3)
    mean_step = load_checkpoint(saved).numbers["synchrony"]["server"]["mean_step"]
    updates = 3 * made.train.num_micro_batches // made.synchrony.gradients_per_update
    assert mean_step["count"] == updates
    assert mean_step["sum"] > 0
    check_replay(trained(2, made, TRAINING, saved))


def fit_beyond(made: Recipe, folder: Path) -> str:
    """Rank 1 finds that the norm of its first gradient is beyond float32.

    Its owner finds nothing: it takes the norm of norms. Else it would spoil the first update,
    whoever made it, and a rank that computes with that could end the training before rank 1 does.
    """

    def norm_of(tensors: Sequence[Tensor], *_: Any, **__: Any) -> Tensor:
        are_gradients = any(tensor.ndim for tensor in tensors)
        return torch.tensor(torch.inf if os.environ["RANK"] == "1" and are_gradients else 1.0)

    with patch.object(torch.nn.utils, "get_total_norm", norm_of):
        return TRAINING.error(made, folder)


def test_a_norm_beyond_float32_is_told_by_all(ranks: Ranks, tmp_path: Path) -> None:
    """Each gradient is finite, and so is the loss."""
    made = recipe(sharded("asynchronous"), solver={"clip_gradients": 1.0})
    beyond = "the norm of the gradient is beyond float32"
    for said in ranks.shared(3, fit_beyond, made, tmp_path / "run"):
        assert said.startswith("NotFiniteError: ")
        assert beyond in said


def received_over_lines() -> tuple[int, list[int]]:
    """The connections of two ranks with two learners each, and what comes over each line."""
    with join("cpu") as world:
        lines = OwnerLines(store_of(world), world.rank, world.world_size, 2, 20.0)
        (other,) = lines.others
        of_first = lines.to_owner, lines.to_learner
        kinds = of_first if world.is_first else of_first[::-1]
        ends = [line(other, place) for place in range(2) for line in kinds]
        ends.append(lines.order_line(other, TELL, TELL))
        received = []
        for number, line in enumerate(ends):
            wait = line.begin_send(torch.tensor([10 * world.rank + number]))
            line.receive(came := torch.zeros(1, dtype=torch.int64))
            wait()
            received.append(int(came))
        connections = len({id(vars(line)["_group"]) for line in ends})
        gather_text(world, "")  # the other has received all
    return connections, received


def test_each_learner_of_each_rank_has_a_connection_of_its_own(ranks: Ranks) -> None:
    """On which no pull waits behind one that goes the other way."""
    assert ranks.shared(2, received_over_lines) == [(5, [10, 11, 12, 13, 14]), (5, [0, 1, 2, 3, 4])]


@pytest.mark.parametrize("compressor", ["none", "float16"])
def test_its_bytes_are_those_of_the_events(trained: Trained, compressor: str) -> None:
    """An ask brings the owner's part of the weights, a push its part of the gradient."""
    words = {"mode": "asynchronous", "server": "sharded", "compressor": compressor}
    run = trained(3, recipe(words), TRAINING).folder
    named = {name: p for name, p in Everything().named_parameters() if p.requires_grad}
    parcel = Parcel(named)
    parts = cut(parcel, 3)
    shards = gradients = [shard.nbytes for shard in parts]
    if compressor == "float16":  # each piece of a parameter in rows of 256 elements
        gradients = [sum(-(-len(run) // 256) * 512 for run in e.pieces.values()) for e in parts]
    head = OwnerHead(OwnerLayout(named, parcel, (), Coder(), clips=False)).fill(ASK).nbytes
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


def fit_in_files(made: Recipe, folder: Path) -> tuple[Result, int]:
    """With no room in memory. Also how many versions this rank has had in files."""
    with (
        patch.object(server_memory, "MAX_BYTES", 0),
        patch.object(owner, "bytes_in_file", wraps=bytes_in_file) as in_file,
    ):
        return TRAINING(made, folder), in_file.call_count


def test_versions_that_memory_has_no_room_for_are_in_files(ranks: Ranks, tmp_path: Path) -> None:
    results = ranks.shared(2, fit_in_files, recipe(sharded("stale")), tmp_path / "run")
    assert all(versions > 4 for _, versions in results)
    check_replay(results[0][0])


def end_when_lost(made: Recipe, folder: Path) -> str:
    """The last rank is killed once there is a checkpoint."""
    with killed(2, lambda _: (folder / "checkpoints/step-00000003").exists()):
        return TRAINING.error(made, folder)


def test_a_lost_owner_ends_all(ranks: Ranks, trained: Trained, tmp_path: Path) -> None:
    """They say who it was, and the run goes on from its checkpoint."""
    run = tmp_path / "run"
    made = recipe(sharded("softsync"), train={"steps": 40, "eval_every": 0})
    for said in ranks.shared(3, end_when_lost, made, run, lost={2})[:2]:
        assert said.startswith("PeerLostError: ")
        assert "rank 2" in said
    check_replay(trained(2, made, TRAINING, run / "checkpoints" / "step-00000003"))
