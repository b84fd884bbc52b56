"""Workers that write to the same weights without a lock: they learn, and nothing is lost."""

import os
from collections import Counter
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import firecaffe
from firecaffe import CheckpointConfig, Recipe, Result, SolverConfig, SynchronyConfig, TrainConfig
from firecaffe.data import TensorDataset
from firecaffe.errors import FirecaffeError
from firecaffe.synchrony.server_policies import Leaf
from firecaffe.training.modes.served.lockless import LocklessBench
from firecaffe.training.modes.served.server_memory import parcel_bytes
from tests.kit.training import data, network
from tests.kit.worlds import Trained, Training, checkpoint_of
from tests.ranks.killed import before_batches
from tests.ranks.networks import Everything
from tests.ranks.served import LOCKLESS, TRAINING, recipe, replayed, synchrony
from tests.world import Ranks


def linear() -> nn.Module:
    return nn.Linear(6, 1)


def points(samples: int, seed: int) -> TensorDataset:
    """Points near a plane. The least squares are known."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 6, generator=generator)
    noise = torch.randn(samples, generator=generator) / 10
    targets = inputs @ torch.arange(1.0, 7.0) - 2 + noise
    return TensorDataset(inputs, targets[:, None])


def losses_of(result: Result) -> list[float]:
    return [row["loss"] for row in result.history if row["kind"] == "train"]


def test_it_comes_to_the_least_squares(trained: Trained) -> None:
    """A convex problem, by rates that fall to nothing."""
    made = Recipe(
        train=TrainConfig(32, 4, steps=80, seed=3),
        solver=SolverConfig(base_lr=0.05, lr_policy="poly", power=1.0, momentum=0.5),
        synchrony=SynchronyConfig(**LOCKLESS),
        task=firecaffe.TaskConfig("regression"),
    )
    result = trained(2, made, Training(linear, 256, data=points))
    weights = torch.cat([p.flatten() for p in firecaffe.load(result.folder, linear).parameters()])
    samples = points(256, 0)
    design = torch.cat([samples.inputs, torch.ones(256, 1)], 1).double()
    optimum = torch.linalg.lstsq(design, samples.targets.double()).solution
    torch.testing.assert_close(weights.detach().double(), optimum[:, 0], atol=0.02, rtol=0)
    losses = losses_of(result)
    assert losses[0] > 10
    best = float((design @ optimum - samples.targets).square().mean())
    assert sum(losses[-8:]) / 8 == pytest.approx(best, rel=0.2)


def test_it_learns_with_buffers(trained: Trained) -> None:
    """The loss falls from guessing's, 1.39."""
    train = {"steps": 50, "eval_every": 0}
    made = recipe(LOCKLESS, train=train, checkpoint=CheckpointConfig())
    result = trained(2, made, Training(network, 300, data=data))
    losses = losses_of(result)
    assert losses[0] > 0.95  # of five updates
    # The middle one: BatchNorm over four samples is noise, and who comes late is chance.
    assert median(losses[-20:]) < 0.75
    assert result.top1 > 0.9


@pytest.mark.parametrize(
    "solver",
    [
        {"momentum_form": "caffe"},
        {"type": "nesterov", "momentum_form": "caffe"},
        {"clip_gradients": 0.05, "decay_form": "l1"},
    ],
    ids=["caffe", "nesterov", "clip and l1"],
)
def test_one_worker_alone_does_what_a_server_does(trained: Trained, solver: dict[str, Any]) -> None:
    """Nothing is torn, and nothing late. From a checkpoint with a momentum, too."""
    digests = set()
    for words in (LOCKLESS, {"mode": "asynchronous"}):
        made = recipe(words, solver=solver)
        whole = trained(1, made, TRAINING)
        again = trained(1, made, TRAINING, checkpoint_of(whole, 3))
        digests |= {whole.weights_sha256, again.weights_sha256}
    assert len(digests) == 1


def test_a_norm_beyond_float32_updates_nothing() -> None:
    """Clipped by it, all gradients were zero, and momentum and decay went on."""
    layer = nn.Linear(2, 1)
    named = dict(layer.named_parameters())
    optimizer = torch.optim.SGD(named.values(), lr=0.1, weight_decay=0.1)
    run: Any = SimpleNamespace(
        learning_rate=lambda _: 0.1,
        momentum=lambda _: None,
        order=SimpleNamespace(leaf_weight=lambda *_: 1.0),
        recipe=Recipe(solver=SolverConfig(clip_gradients=1.0)),
    )
    bench: Any = SimpleNamespace(named=named)
    before = {name: weight.detach().clone() for name, weight in named.items()}
    for value, updates in ((3e38, False), (1.0, True)):
        gradients = {name: torch.full_like(weight, value) for name, weight in named.items()}
        assert LocklessBench(bench, optimizer, run)._update(Leaf(0, 0), gradients) == updates
        assert all(weight.equal(before[name]) != updates for name, weight in named.items())


def fit_and_note(made: Recipe, folder: Path, notes: Path) -> Result:
    def note(step: int, leaf: int) -> None:
        with notes.open("a") as file:
            file.write(f"{os.environ['RANK']} {step} {leaf}\n")

    with before_batches(note):
        return TRAINING(made, folder)


def test_each_micro_batch_comes_once(ranks: Ranks, tmp_path: Path) -> None:
    run, notes = tmp_path / "run", tmp_path / "notes"
    ranks.shared(3, fit_and_note, recipe({**LOCKLESS, "warm_steps": 1}), run, notes)
    rows = [tuple(map(int, row.split())) for row in notes.read_text().splitlines()]
    taken = Counter((step, leaf) for _, step, leaf in rows if step >= 1)
    # An epoch is 25 micro-batches in 5 steps.
    leaves = {(step, leaf) for step in range(8) for leaf in range(1 if step % 5 == 4 else 6)}
    assert taken == dict.fromkeys((place for place in leaves if place[0] >= 1), 1)
    assert len({rank for rank, step, _ in rows if step >= 1}) > 1
    row = synchrony(run)
    assert row["gradients"] == 25 + 18 - 6
    # No gradient travels, but losses, counts and changes of buffers.
    gradient = parcel_bytes(dict(Everything().named_parameters()))
    for rank in (1, 2):
        count = sum(r == rank and step >= 1 for r, step, _ in rows)
        assert row["pushed_bytes_by_learner"][str(rank)] < count * gradient or not count
    assert not (run / "events.jsonl").exists()


def test_a_run_is_resumed_on_other_workers_and_is_not_replayed(trained: Trained) -> None:
    start = checkpoint_of(trained(3, recipe(LOCKLESS), TRAINING), 3)
    result = trained(2, recipe(LOCKLESS), TRAINING, start)
    assert (result.steps, synchrony(result.folder)["gradients"]) == (8, 25 + 18)
    with pytest.raises(FirecaffeError, match=r"synchrony\.lock none"):
        replayed(result.folder)
