"""One worker's steps: what BatchNorm's statistics, clipping and counts come to; and on a device
that works behind the host, which is never stopped, while no bit changes.
"""

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.utils._python_dispatch import TorchDispatchMode

from firecaffe.data import TensorDataset
from firecaffe.errors import NotFiniteError
from firecaffe.tasks import TaskConfig, task_of
from firecaffe.training.modes.every_step import EveryStep
from firecaffe.training.outcome import Outcome, StepMarks, StepResult
from firecaffe.transport.queue import Mark, Queue
from tests.kit.training_steps import CONFIG, Worker

STEPS, RATE = 5, 0.2
TASK = task_of(TaskConfig(), 6)

Make = Callable[..., Worker]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.norm = nn.BatchNorm2d(3, momentum=0.2)
        self.head = nn.Linear(3, 6)

    def forward(self, images: Tensor) -> Any:
        return self.head(torch.relu(self.norm(self.conv(images))).mean((2, 3)))


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes workers on 27 images, which are closed at the end."""
    made: list[Worker] = []

    def one(net: nn.Module | None = None, **words: Any) -> Worker:
        torch.manual_seed(3)
        net = Net() if net is None else net
        images = torch.randn(27, 1, 6, 6, generator=torch.Generator().manual_seed(2))
        data = TensorDataset(images, torch.arange(27) % 6)
        words = {"task": TASK, **words}
        made.append(Worker(net.train(), data, optim.SGD(net.parameters(), 1.0), **words))
        return made[-1]

    yield one
    for worker in made:
        worker.reducer.close()


def test_batchnorm_moves_by_the_mean_of_its_micro_batches(make: Make) -> None:
    """(1 - momentum) start + momentum · (mean over samples of each micro-batch's statistic); and
    every micro-batch starts from the step's start.
    """
    worker = make()
    net: Any = worker.net
    seen: list[list[Tensor]] = []
    net.norm.register_forward_pre_hook(
        lambda norm, _: seen.append([buffer.clone() for buffer in norm.buffers()])
    )
    for step in range(STEPS):
        start = [buffer.clone() for buffer in net.norm.buffers()]
        old_mean, old_var = start[0].double(), start[1].double()
        new_mean, new_var = torch.zeros(3).double(), torch.zeros(3).double()
        with torch.no_grad():
            for images, _ in worker.micro_batches(step):
                features = net.conv(images).double()
                share = len(images) / worker.order.samples_in_step(step)
                new_mean += share * (0.8 * old_mean + 0.2 * features.mean((0, 2, 3)))
                new_var += share * (0.8 * old_var + 0.2 * features.var((0, 2, 3)))
        seen.clear()
        worker.step(step, RATE)
        assert len(seen) == (4 if step == 2 else 5)
        for buffers in seen:
            assert all(itertools.starmap(torch.equal, zip(buffers, start, strict=True)))
        torch.testing.assert_close(net.norm.running_mean, new_mean.float())
        torch.testing.assert_close(net.norm.running_var, new_var.float())
        # A step is one batch, however many micro-batches it has.
        assert net.norm.num_batches_tracked == step + 1


def test_loss_and_counts_of_a_step_are_means_over_its_samples(make: Make) -> None:
    """The weights are those of a bare loop, bit for bit, in tests/parity."""
    worker = make()
    for step in range(STEPS):
        net = copy.deepcopy(worker.net)
        samples, losses, top1, top5 = 0, 0.0, 0, 0
        for images, labels in worker.micro_batches(step):
            logits = net(images).detach()
            losses += F.cross_entropy(logits, labels, reduction="sum").item()
            samples += len(labels)
            ranking = logits.argsort(1, descending=True)
            top1 += int((ranking[:, 0] == labels).sum())
            top5 += int((ranking[:, :5] == labels[:, None]).sum())
        result = worker.step(step, RATE)
        assert result.timings.step == step + 1  # counted from 1, as in every record
        assert result.samples == samples == (7 if step == 2 else 10)
        assert result.loss == pytest.approx(losses / samples, rel=1e-5)
        assert result.metrics == {"top1": top1 / samples, "top5": top5 / samples}


@pytest.mark.parametrize("scaled", [False, True])
def test_norms_of_micro_batches_and_of_their_mean(make: Make, scaled: bool) -> None:
    """Before clipping, and without the loss scale; against autograd, micro-batch by micro-batch."""
    config = replace(CONFIG, autocast="float16") if scaled else CONFIG
    worker = make(clip_gradients=0.01, config=config)
    made = worker.stepper.holding, worker.stepper.update, worker.batches, range(5)
    stepper = EveryStep(*made, is_measured=lambda step: step == 1)
    assert stepper.run(0, RATE).read().squares is None
    net, weights = worker.net, list(worker.net.parameters())
    gradients = []
    for images, labels in worker.micro_batches(1):
        with torch.autocast("cpu", torch.float16, enabled=scaled, cache_enabled=True):
            loss = F.cross_entropy(net(images), labels)
        of_leaf = torch.autograd.grad(loss, weights)
        gradients.append(torch.cat([each.flatten() for each in of_leaf]).double())
    of_each = sum(float(each.square().sum()) for each in gradients)
    of_mean = float(torch.stack(gradients).mean(0).square().sum())
    assert of_mean > 0.01**2
    assert of_each > 5 * of_mean
    found = stepper.run(1, RATE).read().squares
    assert found == pytest.approx((of_each, of_mean), rel=1e-2 if scaled else 1e-5)


def test_clipping_keeps_the_direction(make: Make) -> None:
    free, clipped, limited = make(), make(clip_gradients=0.01), make(clip_gradients=1e6)
    start = nn.utils.parameters_to_vector(free.net.parameters()).detach().clone()
    moved = []
    for worker in (free, clipped, limited):
        worker.step(0, RATE)
        moved.append(nn.utils.parameters_to_vector(worker.net.parameters()).detach() - start)
    assert moved[1].norm().item() == pytest.approx(RATE * 0.01, rel=1e-3)
    directions = moved[1] / moved[1].norm(), moved[0] / moved[0].norm()
    torch.testing.assert_close(*directions, rtol=1e-3, atol=1e-4)
    # A limit that is not reached changes nothing.
    assert torch.equal(moved[2], moved[0])


class Noise(nn.Module):
    """Its loss is what dropout left of a row of ones."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.seen: list[tuple[float, ...]] = []

    def forward(self, images: Tensor) -> Tensor:
        kept = F.dropout(torch.ones(6), 0.5)
        self.seen.append(tuple(kept.tolist()))
        return self.weight * kept + 0 * images.mean((1, 2, 3))[:, None]


def test_dropout_is_a_function_of_step_and_micro_batch(make: Make) -> None:
    def masks(*steps: int, seed: int = 5) -> list[tuple[float, ...]]:
        net = Noise()
        worker = make(net, config=replace(CONFIG, seed=seed))
        for step in steps:
            torch.rand(step)  # what was drawn before must not matter
            worker.step(step, RATE)
        return net.seen

    both = masks(0, 1)
    assert both == masks(0) + masks(1)
    assert masks(1, 0) == masks(1) + masks(0)
    assert len(set(both)) > 5
    assert masks(0, seed=6) != masks(0)


READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__")


class Place(Mark):
    """A mark that the device gets to when it is told to."""

    def __init__(self, number: int, device: "Behind") -> None:
        self.time_s, self.device = float(number), device

    def is_over(self) -> bool:
        return self.time_s <= self.device.done

    def seconds_after(self, earlier: Any) -> float:
        assert self.is_over()
        return super().seconds_after(earlier)


class Behind(Queue):
    """A CPU that is taken for a device which has done nothing until it catches up."""

    is_async = True

    def __init__(self) -> None:
        self.queued, self.done = 0, 0.0

    def mark(self) -> Place:
        self.queued += 1
        return Place(self.queued, self)

    def get_to(self, mark: Any) -> None:
        self.done = mark.time_s


class _Scalars(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, seen: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_local_scalar_dense" in str(func):
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def blocking_calls() -> Iterator[list[str]]:
    """What would stop the host on a GPU: every reading of a tensor's elements; two are tried."""
    seen: list[str] = []

    def noted(name: str, real: Any) -> Any:
        def read(*words: Any) -> Any:
            seen.append(name)
            return real(*words)

        return read

    with pytest.MonkeyPatch.context() as patch, _Scalars(seen):
        for name in READS:
            patch.setattr(Tensor, name, noted(name, getattr(Tensor, name)))
        assert [bool(torch.ones(1)), *torch.zeros(1).tolist()] == [True, 0.0]
        assert len(seen) >= 2
        seen.clear()
        yield seen


def read(outcome: Outcome, device: Behind) -> StepResult:
    """With the device as far as the outcome's end, and no further."""
    assert isinstance(outcome.times, StepMarks)
    end = outcome.times.end_mark
    return outcome.read(lambda: device.get_to(end))


@pytest.mark.parametrize("clip", [0.0, 0.3])
def test_nothing_stops_the_host_and_results_are_read_a_step_late(clip: float, make: Make) -> None:
    at_once, behind = make(clip_gradients=clip), make(clip_gradients=clip)
    expected = [at_once.stepper.run(step, RATE).read() for step in range(4)]
    device = behind.reducer.queue = Behind()
    outcomes: list[Outcome] = []
    found: list[StepResult] = []
    for step in range(4):
        with blocking_calls() as seen:
            outcomes.append(behind.stepper.run(step, RATE))
        assert seen == [], f"step {step}"
        if step:
            assert not outcomes[step - 1].times.is_over()
            found.append(read(outcomes[step - 1], device))
    found.append(read(outcomes[-1], device))
    for own, other in zip(found, expected, strict=True):
        assert (own.samples, own.loss, own.metrics) == (other.samples, other.loss, other.metrics)
    weights = at_once.net.state_dict()
    for name, own in behind.net.state_dict().items():
        assert torch.equal(own, weights[name])


def test_a_gradient_that_is_not_finite_is_named_a_step_late(make: Make) -> None:
    worker = make()
    device = worker.reducer.queue = Behind()
    worker.stepper.run(0, RATE)
    nn.init.constant_(worker.named["head.weight"], float("inf"))
    late = worker.stepper.run(1, RATE)
    worker.stepper.run(2, RATE)
    with pytest.raises(NotFiniteError, match="conv") as caught:
        read(late, device)
    assert caught.value.step == 2  # not the one under way
