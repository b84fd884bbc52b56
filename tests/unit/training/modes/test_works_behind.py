"""A step on a device that works behind the host: the host is never stopped, and no bit changes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from firecaffe.errors import NotFiniteError
from firecaffe.training.outcome import Outcome, StepResult
from firecaffe.training.times import StepMarks
from firecaffe.transport.queue import CpuQueue
from tests.unit.training.modes.test_every_step import RATE, Net, Worker

READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__")


class Place(float):
    """A mark that the device gets to when it is told to."""

    device: "Behind"

    def is_over(self) -> bool:
        return self <= self.device.done

    def seconds_after(self, earlier: float) -> float:
        assert self.is_over()
        return self - earlier


class Behind(CpuQueue):
    """A CPU that is taken for a device which has done nothing until it catches up."""

    works_behind = True

    def __init__(self) -> None:
        self.queued, self.done = 0, 0.0

    def mark(self) -> Place:
        self.queued += 1
        place = Place(self.queued)
        place.device = self
        return place

    def get_to(self, mark: Any) -> None:
        self.done = mark


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
    """What would stop the host on a GPU: every reading of a tensor's elements."""
    seen: list[str] = []

    def noted(name: str, real: Any) -> Any:
        def read(*words: Any) -> Any:
            seen.append(name)
            return real(*words)

        return read

    with pytest.MonkeyPatch.context() as patch, _Scalars(seen):
        for name in READS:
            patch.setattr(Tensor, name, noted(name, getattr(Tensor, name)))
        yield seen


def made(clip: float = 0.0) -> Worker:
    torch.manual_seed(3)
    return Worker(Net().train(), clip_gradients=clip)


def read(outcome: Outcome, device: Behind) -> StepResult:
    """With the device as far as the outcome's end, and no further."""
    assert isinstance(outcome.times, StepMarks)
    end = outcome.times.end_mark
    return outcome.read(lambda: device.get_to(end))


def test_readings_are_seen() -> None:
    with blocking_calls() as seen:
        bool(torch.zeros(1))
        torch.zeros(2).tolist()
    assert len(seen) >= 2


@pytest.mark.parametrize("clip", [0.0, 0.3])
def test_nothing_stops_the_host_and_results_are_read_a_step_late(clip: float) -> None:
    at_once, behind = made(clip), made(clip)
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
    for worker in (at_once, behind):
        worker.reducer.close()


def test_a_gradient_that_is_not_finite_is_named_a_step_late() -> None:
    worker = made()
    device = worker.reducer.queue = Behind()
    assert isinstance(worker.net, Net)
    worker.stepper.run(0, RATE)
    nn.init.constant_(worker.net.head.weight, float("inf"))
    late = worker.stepper.run(1, RATE)
    worker.stepper.run(2, RATE)
    with pytest.raises(NotFiniteError, match="conv") as caught:
        read(late, device)
    assert caught.value.step == 2  # not the one under way
    worker.reducer.close()
