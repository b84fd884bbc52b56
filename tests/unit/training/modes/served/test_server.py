"""A server against synchronous steps; rules for late gradients against loops; and its log."""

import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from firecaffe.data import TensorDataset
from firecaffe.errors import NotFiniteError, RunError
from firecaffe.recipe.sections import TrainConfig
from firecaffe.solvers.update_rules import DelayedNesterov
from firecaffe.synchrony.config import SynchronyConfig
from firecaffe.synchrony.events import Event
from firecaffe.synchrony.log import Lines, head
from firecaffe.synchrony.server_policies import Backup, BackupAgain, Leaf, LeafQueue, Leaves, Stale
from firecaffe.training.modes.served import server_memory as memory
from firecaffe.training.modes.served.served_mode import Served, leaves_of
from firecaffe.training.modes.served.server_memory import copy_in_file
from firecaffe.training.modes.served.server_steps import ServedStepper, keep_lines
from tests.kit.training_fixtures import Patch
from tests.kit.training_steps import CONFIG, Worker
from tests.unit.synchrony.drive import some_events, updates, write_log
from tests.unit.training.modes.served.made import CURVATURE, Some, in_order, late, quadratic, served
from tests.unit.training.test_verify import MODES, train

# --- steps, versions and logs ---------------------------------------------------------------------

STEPS, RATE = 5, 0.2


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


def made(samples: int = 27, config: TrainConfig = CONFIG) -> Worker:
    torch.manual_seed(3)
    net = Net().train()
    images = torch.randn(samples, 1, 6, 6, generator=torch.Generator().manual_seed(2))
    data = TensorDataset(images, torch.arange(samples) % 6)
    return Worker(net, data, optim.SGD(net.parameters(), 1.0, momentum=0.9), config)


def queue(parts: Worker, steps: int = STEPS) -> LeafQueue:
    return LeafQueue(leaves_of(parts.order, 0, steps))


def backup_events(parts: Worker, backups: int) -> Iterator[Event]:
    return in_order(
        Backup(queue(parts), 3, 0, SynchronyConfig(backup_workers=backups)), (0, 2, 0, 1, 2, 2, 0)
    )


def same_bits(parts: Worker, other: Worker) -> bool:
    ours, theirs = parts.tensors(), other.tensors()
    return ours.keys() == theirs.keys() and all(map(torch.equal, ours.values(), theirs.values()))


@pytest.mark.parametrize("backups", [0, 1, 2])
def test_backup_is_the_synchronous_step_over_the_leaves_that_count(backups: int) -> None:
    """Bit for bit, as if the dropped leaves had no samples. Of 27 samples, a step is short."""
    parts, other = (made(30 if backups else 27) for _ in range(2))
    events = list(backup_events(parts, backups))
    dropped = [leaf for update in updates(events) for leaf in update.dropped]
    assert len(dropped) == backups * STEPS
    other.stepper.batches = Some(other.batches, dropped)
    stepper = served(parts, SynchronyConfig("backup", backup_workers=backups), events, STEPS)
    for step in range(STEPS):
        ours, theirs = stepper.run(step, RATE).read(), other.stepper.run(step, RATE).read()
        assert same_bits(parts, other)
        assert (ours.samples, ours.metrics) == (theirs.samples, theirs.metrics)
        assert ours.loss == pytest.approx(theirs.loss)
    assert stepper.server.memory.parts() == {}


def overflowing() -> Worker:
    """Gradients overflow between the head's two factors, at the first scales."""
    parts = made(30, replace(CONFIG, autocast="float16"))
    head = parts.net.get_submodule("head")
    head.register_forward_hook(lambda _net, _inputs, logits: logits * 2.0**-4 * 2.0**4)
    return parts


def test_an_update_that_overflows_is_skipped_as_a_synchronous_step_is() -> None:
    parts, other = overflowing(), overflowing()
    events = backup_events(parts, 0)
    stepper = served(parts, SynchronyConfig("backup", backup_workers=0), events, STEPS)
    scales = []
    for step in range(STEPS):
        stepper.run(step, RATE).read()
        other.stepper.run(step, RATE).read()
        assert same_bits(parts, other)
        assert parts.forward.scaler.state_dict() == other.forward.scaler.state_dict()
        scales.append(parts.forward.scaler.get_scale())
    assert STEPS > len(set(scales)) > 1  # some are skipped, and some are not
    assert stepper.server.memory.parts() == {}


def test_what_overflows_teaches_no_rule_for_late_gradients() -> None:
    for rule in ("delay", "gap"):
        parts = overflowing()
        events = in_order(Stale(queue(parts), 3, 0, SynchronyConfig(max_staleness=2)), (0, 1, 2))
        stepper = served(parts, SynchronyConfig("stale", compensate=rule), events, STEPS)
        for step in range(STEPS):
            stepper.run(step, RATE / 5)
        assert parts.forward.scaler.get_scale() < 2**16
        assert all(square.isfinite().all() for square in stepper.server.memory.mean_square.values())
        assert all(parameter.isfinite().all() for parameter in parts.named.values())


def test_s_of_0_with_one_leaf_each_is_synchronous() -> None:
    """N plain updates at one version are one by the mean of N gradients, at N times the rate."""
    parts, other = quadratic(), quadratic()
    events = in_order(Stale(queue(parts, 3), 4, 0, SynchronyConfig(max_staleness=0)), (2, 0, 3, 1))
    stepper = served(parts, SynchronyConfig("stale", max_staleness=0), events, 3)
    for step in range(3):
        stepper.run(step, RATE / 4)
        other.stepper.run(step, RATE)
        torch.testing.assert_close(parts.named["w"], other.named["w"])


def test_buffers_change_by_what_a_learner_saw() -> None:
    """Each learner has moved the running mean that it had pulled by 0.2 (its mean - that one). The
    server's goes all the way to it, or a part of the way if others have moved it meanwhile.
    """
    parts = made(30)
    net: Any = parts.net
    for parameter in net.conv.parameters():
        parameter.requires_grad_(False)  # so that features are the same at any version
    taus = [0, 1, 2, 0, 3]
    leaves = [[(Leaf(0, place), tau)] for place, tau in enumerate(taus)]
    served(parts, SynchronyConfig("asynchronous"), late(leaves), 1).run(0, RATE)
    running = [torch.zeros(3).double()]
    for place, tau in enumerate(taus):
        images, _ = parts.batches.train_batch(0, place)
        mean = net.conv(images).detach().double().mean((0, 2, 3))
        pulled = running[-1 - tau]
        own = pulled + 0.2 * (mean - pulled)
        running.append(running[-1] + (own - running[-1]) / (1 + tau))
    torch.testing.assert_close(net.norm.running_mean.double(), running[-1], rtol=1e-5, atol=1e-6)
    assert net.norm.num_batches_tracked == 1  # of the step, however many leaves it has


def run_to_the_end(stepper: ServedStepper, first: int = 0) -> int:
    """The most versions that were kept after a step."""
    most = 0
    for step in range(first, STEPS):
        stepper.run(step, RATE / 5)
        most = max(most, len(stepper.server.memory.versions))
    return most


def test_versions_are_kept_as_long_as_they_are_needed() -> None:
    parts = made()
    events = in_order(Stale(queue(parts), 3, 0, SynchronyConfig(max_staleness=2)), (0, 1, 0, 2))
    stepper = served(parts, SynchronyConfig("stale"), events, STEPS)
    most = run_to_the_end(stepper)
    assert (most <= 3, stepper.server.memory.versions) == (True, {})
    # That of who is late is not: learner 0 is hardly ever done, and others compute its leaves.
    parts = made()
    events = in_order(
        BackupAgain(queue(parts), 3, 0, SynchronyConfig(backup_workers=2)), (1, 2) * 6 + (0,)
    )
    words = SynchronyConfig("backup", backup_workers=2, dropped="again")
    stepper = served(parts, words, events, STEPS)
    most = run_to_the_end(stepper)
    assert (most <= 1, stepper.server.memory.parts()) == (True, {})


def test_a_gradient_that_is_not_finite_ends_it_before_the_update() -> None:
    parts = made()
    events = in_order(Stale(queue(parts), 3, 0, SynchronyConfig(max_staleness=2)), (0, 1, 2))
    stepper = served(parts, SynchronyConfig("stale"), events, STEPS)
    stepper.run(0, RATE)
    nn.init.constant_(parts.named["head.bias"], float("inf"))
    with pytest.raises(NotFiniteError, match=r"gradients of 4 learners come late.*warm_steps"):
        run_to_the_end(stepper, 1)
    assert parts.named["conv.weight"].isfinite().all()


def full(*_: object) -> None:
    raise OSError(28, os.strerror(28))


def test_a_log_is_gone_on_with_after_some_lines(tmp_path: Path, monkeypatch: Patch) -> None:
    path, other = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    events, lines = some_events(), Lines()
    whole = write_log(path, events)
    assert not keep_lines(tmp_path / "none", other, 1)
    assert not keep_lines(path, other, len(events) + 2)
    for damaged in (whole[:-1], b"\xff" + whole[1:]):
        path.write_bytes(damaged)
        assert not keep_lines(path, other, len(events) + 1)
    assert not other.exists()
    path.write_bytes(whole)
    assert all([lines.line(head(2, 3)), *map(lines.event, events[:7])])
    assert keep_lines(path, other, lines.count)
    with open(other, "ab") as file:
        file.writelines(map(lines.event, events[7:]))
    assert other.read_bytes() == whole
    # A run that is resumed cuts its own log, which stays whole where a disk is full.
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        keep_lines(path, path, 3)
    assert path.read_bytes() == whole


def test_a_version_in_a_file_is_the_same(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tensors = {
        "convolution": torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last),
        "half": torch.randn(7).half(),
        "count": torch.tensor(12),
        "empty": torch.empty(0, 3),
    }
    copies = copy_in_file(tensors)
    torch.testing.assert_close(copies, tensors, rtol=0, atol=0, check_stride=True)
    tensors["half"].zero_()
    assert copies["half"].abs().sum() > 0
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(RunError, match=r"no room for a version .* TMPDIR"):
        copy_in_file({"w": torch.ones(3)})


def test_versions_in_files_change_no_bit(tmp_path: Path, monkeypatch: Patch) -> None:
    words = MODES["softsync"]
    expected = train(tmp_path / "memory", words, steps=8).state_sha256
    made = []

    def counted(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        made.append(len(tensors))
        return copy_in_file(tensors)

    monkeypatch.setattr(memory, "MAX_BYTES", 0)
    monkeypatch.setattr(memory, "copy_in_file", counted)
    assert train(tmp_path / "files", words, steps=8).state_sha256 == expected
    assert len(made) > 8


@pytest.mark.parametrize(("warm_steps", "warm"), [(0, ""), (3, "; in warm steps ring")])
def test_gradients_go_to_the_server(warm_steps: int, warm: str) -> None:
    """Not by the exchange, which only the steps before it use."""
    mode = Served.__new__(Served)  # of which the answer needs one attribute
    mode.leaves = Leaves(warm_steps, 10, 1, 1, 1)
    run: Any = SimpleNamespace(recipe=SimpleNamespace(synchrony=SimpleNamespace(mode="backup")))
    assert mode.describe_exchange(run, "ring") == f"with a server, backup{warm}"


# --- rules for late gradients ---------------------------------------------------------------------

SMALL_RATE = 0.1
STALENESS = [0, 1, 2, 0, 3, 1, 0, 2, 5, 1, 4, 0]
"""Of the twelve leaves of one sample each; none before version 0."""

LEAVES = [Leaf(step, place) for step in range(3) for place in range(4)]
SINGLE = [[(leaf, tau)] for leaf, tau in zip(LEAVES, STALENESS, strict=True)]


def trained_by(parts: Worker, groups: list[list[tuple[Leaf, int]]], **words: Any) -> Tensor:
    stepper = served(parts, SynchronyConfig("asynchronous", **words), late(groups), 3)
    for step in range(3):
        stepper.run(step, SMALL_RATE).read()
    parts.reducer.close()
    return parts.named["w"].detach().double()


class Loop:
    """The same by hand: weights of all versions, and gradients at any of them."""

    def __init__(self, optimizer: Any = None) -> None:
        self.parts = quadratic(optimizer)
        self.w = [torch.tensor([1.0, -2.0, 0.5]).double()]

    def gradient(self, leaf: Leaf, staleness: int) -> Tensor:
        x = self.parts.data.inputs[self.parts.order.micro_batch(*leaf)].double().mean(0)
        gradient: Tensor = CURVATURE.double() * (self.w[-1 - staleness] - x)
        return gradient

    def step(self, change: Tensor) -> None:
        self.w.append(self.w[-1] - SMALL_RATE * change)

    def check(self, groups: Any = SINGLE, **words: Any) -> None:
        trained = trained_by(self.parts, groups, **words)
        torch.testing.assert_close(trained, self.w[-1], rtol=1e-5, atol=1e-6)
        if "compensate" in words:
            assert not torch.allclose(trained, trained_by(quadratic(), groups), atol=1e-2)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_downpour_and_momentum_at_the_server(momentum: float) -> None:
    """v <- m v + g(W of τ updates ago); W <- W - a v."""
    loop, v = Loop(lambda w: optim.SGD([w], 1.0, momentum=momentum)), torch.zeros(3).double()
    for [(leaf, tau)] in SINGLE:
        v = momentum * v + loop.gradient(leaf, tau)
        loop.step(v)
    loop.check()


def test_softsync_by_staleness() -> None:
    """The mean of three gradients, each divided by its own τ (by 1 for τ = 0)."""
    loop, taus = Loop(), [0, 0, 0, 0, 1, 1, 2, 1, 0, 3, 2, 0]
    pairs = list(zip(LEAVES, taus, strict=True))
    groups = [pairs[place : place + 3] for place in range(0, 12, 3)]
    for group in groups:
        scaled = [loop.gradient(leaf, tau) / max(tau, 1) for leaf, tau in group]
        loop.step(torch.stack(scaled).mean(0))
    loop.check(groups, staleness_rate="inverse", gradients_per_update=3)


def test_delay_compensation() -> None:
    loop, square = Loop(), torch.zeros(3).double()
    for [(leaf, tau)] in SINGLE:
        g = loop.gradient(leaf, tau)
        square = 0.95 * square + 0.05 * g * g
        weight = 2 / (square + 1e-7).sqrt()
        loop.step(g + weight * g * g * (loop.w[-1] - loop.w[-1 - tau]))
    loop.check(compensate="delay")


def test_gap_aware() -> None:
    loop, total, count = Loop(), 0.0, 0
    for [(leaf, tau)] in SINGLE:
        g = loop.gradient(leaf, tau)
        gap = (loop.w[-1] - loop.w[-1 - tau]).square().mean().sqrt()
        if count:
            g = g / (1 + gap / (total / (1 - 0.999**count)))
        loop.step(g)
        moved = float((loop.w[-1] - loop.w[-2]).square().mean().sqrt())
        total, count = 0.999 * total + 0.001 * moved, count + 1
    loop.check(compensate="gap")


@pytest.mark.parametrize(
    "words", [{"compensate": "delay"}, {"compensate": "gap"}, {"staleness_rate": "inverse"}]
)
def test_no_rule_changes_a_gradient_that_is_not_late(words: dict[str, Any]) -> None:
    fresh = [[(leaf, 0)] for leaf in LEAVES]
    assert torch.equal(trained_by(quadratic(), fresh, **words), trained_by(quadratic(), fresh))


def delayed(weight: nn.Parameter, rate: float, count: int, decay: float = 0.0) -> DelayedNesterov:
    settings = {"lr": rate, "momentum": 0.9, "every": count}
    return DelayedNesterov([{"params": [weight], "weight_decay": decay}], settings)


def test_delayed_nesterov() -> None:
    """Four learners: momentum in every fourth update, of the sum of four gradients."""
    loop = Loop(lambda w: delayed(w, 1.0, 4))
    m, d = torch.zeros(3).double(), torch.zeros(3).double()
    for place, [(leaf, tau)] in enumerate(SINGLE):
        g = loop.gradient(leaf, tau)
        d = d + g
        if place % 4 == 3:
            m, d = 0.9 * m + d, torch.zeros(3).double()
            g = g + 0.9 * m
        loop.step(g)
    loop.check(server_momentum="delayed_nesterov", learners=4)


@pytest.mark.parametrize(("count", "decay"), [(5, 0.0), (1, 0.01)])
def test_delayed_nesterov_is_torch_s_on_the_mean(count: int, decay: float) -> None:
    """At the same gradients: N updates are one of torch's, at N times the rate."""
    ours, other = (nn.Parameter(torch.tensor([1.0, -2.0])) for _ in range(2))
    by_count = delayed(ours, 0.1, count, decay)
    words: dict[str, Any] = {"momentum": 0.9, "nesterov": True, "weight_decay": decay}
    nesterov = optim.SGD([other], 0.1 * count, **words)
    generator = torch.Generator().manual_seed(1)
    for _ in range(6):
        gradients = torch.randn(count, 2, generator=generator)
        for gradient in gradients:
            ours.grad = gradient.clone()
            by_count.step()
        other.grad = gradients.mean(0)
        nesterov.step()
        torch.testing.assert_close(ours, other)
