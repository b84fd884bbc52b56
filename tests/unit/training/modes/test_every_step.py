"""One worker's steps: what BatchNorm's statistics, clipping and counts come to."""

import copy
import dataclasses
import itertools
import math
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

from firecaffe.cluster.world import World
from firecaffe.data import Batches, DataConfig, SampleOrder, TensorDataset
from firecaffe.exchange.route import find_route
from firecaffe.gradients.reducer import GradientReducer
from firecaffe.recipe.config import TrainConfig
from firecaffe.tasks import Loss, TaskConfig, task_of
from firecaffe.training.forward import Forward
from firecaffe.training.modes.every_step import empty_counts, steps_of_whole
from firecaffe.training.outcome import StepResult
from firecaffe.transport.exchange import Exchange

TASK = task_of(TaskConfig(), 6)

# Five micro-batches of 2: the third step has 7 samples left, in micro-batches of 2, 2, 2, 1 and 0.
CONFIG = TrainConfig(global_batch_size=10, micro_batch_size=2, seed=5)
NUM_SAMPLES, STEPS, RATE = 27, 5, 0.2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.norm = nn.BatchNorm2d(3, momentum=0.2)
        self.head = nn.Linear(3, 6)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.relu(self.norm(self.conv(images))).mean((2, 3)))
        return logits


class Worker:
    """A world of one with its steps, its optimizer and its reducer."""

    def __init__(
        self,
        net: nn.Module,
        config: TrainConfig = CONFIG,
        loss: Loss = TASK.loss,
        clip_gradients: float = 0.0,
    ) -> None:
        self.net, self.config = net, config
        generator = torch.Generator().manual_seed(2)
        images = torch.randn(NUM_SAMPLES, 1, 6, 6, generator=generator)
        self.data = TensorDataset(images, torch.arange(NUM_SAMPLES) % 6)
        self.order = SampleOrder(config.seed, NUM_SAMPLES, 10, config.micro_batch_size)
        batches = Batches(self.data, self.order, DataConfig())
        forward = Forward(net, dataclasses.replace(TASK, loss=loss), config)
        parameters = dict(net.named_parameters())
        self.optimizer = optim.SGD(net.parameters(), 1.0)
        self.reducer = GradientReducer(
            parameters,
            list(reversed(range(len(parameters)))),
            forward.empty_tail(),
            empty_counts(forward),
            config.num_micro_batches,
            Exchange(
                World(0, 1, torch.device("cpu")), find_route("tree", config.num_micro_batches, 1)
            ),
            bucket_bytes=100,
        )
        leaves = range(config.num_micro_batches)
        made = forward, batches, self.optimizer, self.reducer, leaves
        self.stepper = steps_of_whole(*made, clip_gradients)

    def step(self, step: int) -> StepResult:
        return self.stepper.run(step, RATE).read()

    def micro_batches(self, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Those with samples, as the data set holds them."""
        for leaf in range(self.config.num_micro_batches):
            samples = self.order.micro_batch(step, leaf)
            if len(samples) > 0:
                yield self.data.inputs[samples], self.data.targets[samples]


@pytest.fixture
def worker() -> Iterator[Worker]:
    torch.set_num_threads(1)
    torch.manual_seed(3)
    made = Worker(Net().train())
    yield made
    made.reducer.close()


def test_batchnorm_moves_by_the_mean_of_its_micro_batches(worker: Worker) -> None:
    """(1 - momentum) start + momentum · (mean over samples of each micro-batch's statistic)."""
    net = worker.net
    assert isinstance(net, Net)
    for step in range(STEPS):
        mean, var = net.norm.running_mean, net.norm.running_var
        assert mean is not None
        assert var is not None
        old_mean, old_var = mean.double(), var.double()
        new_mean, new_var = torch.zeros(3).double(), torch.zeros(3).double()
        samples = worker.order.samples_in_step(step)
        with torch.no_grad():
            for images, _ in worker.micro_batches(step):
                features = net.conv(images).double()
                share = len(images) / samples
                new_mean += share * (0.8 * old_mean + 0.2 * features.mean((0, 2, 3)))
                new_var += share * (0.8 * old_var + 0.2 * features.var((0, 2, 3)))
        worker.step(step)
        torch.testing.assert_close(net.norm.running_mean, new_mean.float())
        torch.testing.assert_close(net.norm.running_var, new_var.float())
        # A step is one batch, however many micro-batches it has.
        assert net.norm.num_batches_tracked == step + 1


class Headed(Net):
    """A network that returns more than its logits, and not tensors alone."""

    def forward(self, images: Tensor) -> tuple[Tensor, None, dict[str, Tensor]]:  # type: ignore[override]
        logits = super().forward(images)
        return logits, None, {"hidden": logits}


def test_what_a_network_returns_beside_its_logits_is_its_own() -> None:
    worker = Worker(
        Headed().train(), loss=lambda outputs, labels: F.cross_entropy(outputs[0], labels)
    )
    assert set(worker.step(0).metrics) == {"top1", "top5"}
    worker.reducer.close()


def test_every_micro_batch_starts_from_the_steps_start(worker: Worker) -> None:
    net = worker.net
    assert isinstance(net, Net)
    seen: list[list[Tensor]] = []
    net.norm.register_forward_pre_hook(
        lambda norm, _: seen.append([buffer.clone() for buffer in norm.buffers()])
    )
    for step in range(STEPS):
        seen.clear()
        start = [buffer.clone() for buffer in net.norm.buffers()]
        worker.step(step)
        assert len(seen) == (4 if step == 2 else 5)
        for buffers in seen:
            assert all(itertools.starmap(torch.equal, zip(buffers, start, strict=True)))
        ends = zip(net.norm.buffers(), start, strict=True)
        assert not any(itertools.starmap(torch.equal, ends))


def test_a_step_is_one_update_by_the_mean_over_its_samples(worker: Worker) -> None:
    """Loss, counts and weights, against a loop over single micro-batches in float64."""
    for step in range(STEPS):
        net = copy.deepcopy(worker.net).double()
        samples, losses, top1, top5 = 0, 0.0, 0, 0
        for images, labels in worker.micro_batches(step):
            logits = net(images.double())
            loss = F.cross_entropy(logits, labels, reduction="sum")
            torch.autograd.backward(loss)
            losses += loss.item()
            samples += len(labels)
            ranking = logits.argsort(1, descending=True)
            top1 += int((ranking[:, 0] == labels).sum())
            top5 += int((ranking[:, :5] == labels[:, None]).sum())
        result = worker.step(step)
        assert result.samples == samples == (7 if step == 2 else 10)
        assert result.loss == pytest.approx(losses / samples, rel=1e-5)
        assert result.metrics == {"top1": top1 / samples, "top5": top5 / samples}
        with torch.no_grad():
            for parameter, (name, own) in zip(
                net.parameters(), worker.net.named_parameters(), strict=True
            ):
                assert parameter.grad is not None
                expected = parameter - RATE * parameter.grad / samples
                torch.testing.assert_close(own.double(), expected, rtol=1e-4, atol=1e-6, msg=name)


def test_clipping_keeps_the_direction(worker: Worker) -> None:
    free, clipped = worker, Worker(copy.deepcopy(worker.net), clip_gradients=0.01)
    start = [parameter.detach().clone() for parameter in free.net.parameters()]
    free.step(0)
    clipped.step(0)
    moved = [
        torch.cat(
            [(p.detach() - s).flatten() for p, s in zip(net.parameters(), start, strict=True)]
        )
        for net in (free.net, clipped.net)
    ]
    clipped.reducer.close()
    assert moved[1].norm().item() == pytest.approx(RATE * 0.01, rel=1e-3)
    torch.testing.assert_close(
        moved[1] / moved[1].norm(), moved[0] / moved[0].norm(), rtol=1e-3, atol=1e-4
    )


def test_a_limit_that_is_not_reached_changes_nothing(worker: Worker) -> None:
    limited = Worker(copy.deepcopy(worker.net), clip_gradients=1e6)
    worker.step(0)
    limited.step(0)
    limited.reducer.close()
    for own, other in zip(worker.net.parameters(), limited.net.parameters(), strict=True):
        assert torch.equal(own, other)


def test_timings_add_up(worker: Worker) -> None:
    timings = worker.step(3).timings
    parts = (timings.data_s, timings.compute_s, timings.exposed_communication_s, timings.update_s)
    assert timings.step == 4  # counted from 1, as in every record
    assert all(part >= 0 for part in parts)
    assert sum(parts) <= timings.step_s
    assert timings.exchange_s == 0


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


def test_dropout_is_a_function_of_step_and_micro_batch() -> None:
    def masks(*steps: int, seed: int = 5) -> list[tuple[float, ...]]:
        net = Noise()
        worker = Worker(net, TrainConfig(global_batch_size=10, micro_batch_size=2, seed=seed))
        for step in steps:
            torch.rand(step)  # what was drawn before must not matter
            worker.step(step)
        worker.reducer.close()
        return net.seen

    both = masks(0, 1)
    assert both == masks(0) + masks(1)
    assert masks(1, 0) == masks(1) + masks(0)
    assert len(set(both)) > 5
    assert masks(0, seed=6) != masks(0)


def test_the_losses_mean_is_not_its_sum(worker: Worker) -> None:
    """Six classes at random: about log 6 in each step, short or not."""
    losses = [worker.step(step).loss for step in range(3)]
    assert losses == pytest.approx([math.log(6)] * 3, abs=0.5)
