"""A server against synchronous steps: the same bits where nothing is late, and closed forms."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from firecaffe.data import TensorDataset
from firecaffe.errors import NotFiniteError
from firecaffe.recipe.config import TrainConfig
from firecaffe.synchrony.config import SynchronyConfig
from firecaffe.synchrony.events import Event, Push
from firecaffe.synchrony.leaf_queue import Leaf, LeafQueue
from firecaffe.synchrony.server_policies import Backup, BackupAgain, Stale
from firecaffe.training.served.build_served import leaves_of
from tests.unit.training.served.made import Made, Quadratic, Some, in_order, late, quadratic_loss

CONFIG = TrainConfig(global_batch_size=10, micro_batch_size=2, seed=5)
STEPS, RATE = 5, 0.2
"""27 samples: the third step has leaves of 2, 2, 2 and 1, and one without samples."""


class Net(nn.Module):
    """With BatchNorm, dropout, and a layer that only some leaves use."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.norm = nn.BatchNorm2d(3, momentum=0.2)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(3, 6)
        self.sometimes = nn.Linear(6, 6)

    def forward(self, images: Tensor) -> Tensor:
        features = torch.relu(self.norm(self.conv(images))).mean((2, 3))
        logits: Tensor = self.head(self.drop(features))
        return self.sometimes(logits) if images.mean() > 0 else logits


def made(samples: int = 27) -> Made:
    torch.manual_seed(3)
    net = Net().train()
    images = torch.randn(samples, 1, 6, 6, generator=torch.Generator().manual_seed(2))
    data = TensorDataset(images, torch.arange(samples) % 6)
    return Made(net, data, CONFIG, optim.SGD(net.parameters(), 1.0, momentum=0.9))


def backup_events(parts: Made, backups: int, steps: int) -> Iterator[Event]:
    queue = LeafQueue(leaves_of(parts.order, 0, steps))
    return in_order(Backup(queue, 3, 0, backups), (0, 2, 0, 1, 2, 2, 0))


def same_bits(parts: Made, other: Made) -> bool:
    ours, theirs = parts.tensors(), other.tensors()
    return ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) for name in ours
    )


def test_backup_without_a_backup_is_the_synchronous_step() -> None:
    parts, other = made(), made()
    words = SynchronyConfig("backup", backup_workers=0)
    stepper = parts.served(words, backup_events(parts, 0, STEPS), STEPS)
    for step in range(STEPS):
        found = stepper.run(step, RATE).read()
        expected = other.stepper.run(step, RATE).read()
        assert same_bits(parts, other)
        assert (found.samples, found.metrics) == (expected.samples, expected.metrics)
        assert found.loss == pytest.approx(expected.loss)


@pytest.mark.parametrize("backups", [1, 2])
def test_backup_is_the_synchronous_step_over_the_leaves_that_count(backups: int) -> None:
    """Bit for bit, as if the dropped leaves had no samples."""
    parts, other = made(30), made(30)  # full steps alone
    events = list(backup_events(parts, backups, STEPS))
    updates = [each.update for each in events if isinstance(each, Push) and each.update]
    dropped = [leaf for update in updates for leaf in update.dropped]
    assert len(dropped) == backups * STEPS
    other.stepper.batches = Some(other.batches, dropped)
    words = SynchronyConfig("backup", backup_workers=backups)
    stepper = parts.served(words, events, STEPS)
    for step in range(STEPS):
        stepper.run(step, RATE)
        other.stepper.run(step, RATE)
        assert same_bits(parts, other)
    assert stepper.server.memory.parts() == {}


def test_s_of_0_with_one_leaf_each_is_synchronous() -> None:
    """N plain updates at one version are one by the mean of N gradients, at N times the rate."""
    parts, other = quadratic(), quadratic()
    queue = LeafQueue(leaves_of(parts.order, 0, 3))
    events = in_order(Stale(queue, 4, 0, 0), (2, 0, 3, 1))
    stepper = parts.served(SynchronyConfig("stale", max_staleness=0), events, 3)
    for step in range(3):
        stepper.run(step, RATE / 4)
        other.stepper.run(step, RATE)
        torch.testing.assert_close(parts.named["w"], other.named["w"])


def quadratic() -> Made:
    net = Quadratic()
    samples = torch.linspace(-1, 1, 36).reshape(12, 3)
    data = TensorDataset(samples, torch.zeros(12, dtype=torch.int64))
    config = TrainConfig(global_batch_size=4, micro_batch_size=1, seed=3)
    return Made(net, data, config, optim.SGD(net.parameters(), 1.0), quadratic_loss)


def test_buffers_change_by_what_a_learner_saw() -> None:
    """Each leaf moves the running mean by 0.2 (its mean - the running mean that it had pulled)."""
    parts = made(30)
    net = parts.net
    assert isinstance(net, Net)
    for parameter in net.conv.parameters():
        parameter.requires_grad_(False)  # so that features are the same at any version
    taus = [0, 1, 2, 0, 3]
    updates = [[(Leaf(0, place), tau)] for place, tau in enumerate(taus)]
    parts.served(SynchronyConfig("asynchronous"), late(updates), 1).run(0, RATE)
    running = [torch.zeros(3).double()]
    for place, tau in enumerate(taus):
        images, _ = parts.batches.train_batch(0, place)
        mean = net.conv(images).detach().double().mean((0, 2, 3))
        running.append(running[-1] + 0.2 * (mean - running[-1 - tau]))
    assert net.norm.running_mean is not None
    torch.testing.assert_close(net.norm.running_mean.double(), running[-1], rtol=1e-5, atol=1e-6)
    assert net.norm.num_batches_tracked == 1  # of the step, however many leaves it has


def test_versions_are_kept_as_long_as_they_are_needed() -> None:
    parts = made()
    queue = LeafQueue(leaves_of(parts.order, 0, STEPS))
    events = in_order(Stale(queue, 3, 0, 2), (0, 1, 0, 2))
    stepper = parts.served(SynchronyConfig("stale"), events, STEPS)
    for step in range(STEPS):
        stepper.run(step, RATE / 5)
        assert len(stepper.server.memory.versions) <= 3
    assert stepper.server.memory.versions == {}


def test_the_version_of_who_is_late_is_not_kept() -> None:
    """Learner 0 is hardly ever done, and others compute its leaves."""
    parts = made()
    queue = LeafQueue(leaves_of(parts.order, 0, STEPS))
    events = in_order(BackupAgain(queue, 3, 0, 2), (1, 2) * 6 + (0,))
    words = SynchronyConfig("backup", backup_workers=2, dropped="again")
    stepper = parts.served(words, events, STEPS)
    for step in range(STEPS):
        stepper.run(step, RATE / 5)
        assert len(stepper.server.memory.versions) <= 1
    assert stepper.server.memory.parts() == {}


def test_a_gradient_that_is_not_finite_ends_it_before_the_update() -> None:
    parts = made()
    queue = LeafQueue(leaves_of(parts.order, 0, STEPS))
    events = in_order(Stale(queue, 3, 0, 2), (0, 1, 2))
    stepper = parts.served(SynchronyConfig("stale"), events, STEPS)
    stepper.run(0, RATE)
    with torch.no_grad():
        parts.named["head.bias"].fill_(float("inf"))
    with pytest.raises(NotFiniteError, match=r"gradients of 4 learners come late.*warm_steps"):
        run_steps(stepper, 1, STEPS)
    assert parts.named["conv.weight"].isfinite().all()


def run_steps(stepper: Any, first: int, last: int) -> None:
    for step in range(first, last):
        stepper.run(step, RATE)
