"""An evaluation against a plain computation, on any number of ranks."""

import copy
import json
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firecaffe.cluster.world import World
from firecaffe.data import DataConfig, TensorDataset
from firecaffe.errors import OwnCodeError
from firecaffe.models import HeadedLogits, classification_loss
from firecaffe.recipe.config import TrainConfig
from firecaffe.tasks import Loss, Task, TaskConfig, task_of
from firecaffe.tasks.metrics import count_correct
from firecaffe.training import evaluation
from firecaffe.training.evaluation import Evaluation, evaluate
from tests.kit.training import ALONE
from tests.kit.training_fixtures import Patch
from tests.tracebacks import owners

NUM_SAMPLES, NUM_CLASSES = 23, 7


class Counted(TensorDataset):
    """Counts which samples were asked for."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        super().__init__(images, labels, NUM_CLASSES)
        self.asked: Counter[int] = Counter()

    def batch(self, indices_B: Tensor) -> tuple[Tensor, Tensor]:
        self.asked.update(indices_B.tolist())
        return super().batch(indices_B)


@pytest.fixture
def data() -> Counted:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(NUM_SAMPLES, 1, 4, 4, generator=generator)
    return Counted(images, torch.randint(0, NUM_CLASSES, (NUM_SAMPLES,), generator=generator))


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(1)
    # In training, dropout and BatchNorm would give other outputs than in evaluation.
    return nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Dropout(0.5), nn.Linear(16, 7))


def run(net: nn.Module, data: Counted, size: int, world: World, loss: Loss) -> Evaluation:
    task = replace(task_of(TaskConfig(), NUM_CLASSES), loss=loss)
    return evaluate(net, task, data, DataConfig(), TrainConfig(eval_batch_size=size), world)


def uneven_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """Of such different sizes that their sum depends on the order."""
    return F.cross_entropy(outputs, labels) * 1000.0 ** labels[0]


@pytest.mark.parametrize("batch_size", [1, 5, 23, 100])
def test_against_a_plain_computation(net: nn.Module, data: Counted, batch_size: int) -> None:
    before = copy.deepcopy(net.state_dict())
    evaluation = run(net, data, batch_size, ALONE, classification_loss)
    assert data.asked == Counter(range(NUM_SAMPLES))
    # The model is left as it was.
    assert net.training
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())
    net.eval()
    with torch.no_grad():
        logits = net(data.inputs)
    ranking = logits.argsort(1, descending=True).tolist()
    labels = data.targets.tolist()
    top1 = sum(r[0] == label for r, label in zip(ranking, labels, strict=True))
    top5 = sum(label in r[:5] for r, label in zip(ranking, labels, strict=True))
    assert evaluation.samples == NUM_SAMPLES
    assert evaluation.metrics == {"top1": top1 / NUM_SAMPLES, "top5": top5 / NUM_SAMPLES}
    assert evaluation.largest_class_share == Counter(labels).most_common(1)[0][1] / NUM_SAMPLES
    loss = F.cross_entropy(logits, data.targets).item()
    assert evaluation.loss == pytest.approx(loss, rel=1e-6)


def of_one_alone(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs.argmax(1) == int(labels)).sum()


def test_a_metric_of_ones_own_that_takes_no_batch_is_named(net: nn.Module, data: Counted) -> None:
    """What is looked at before the first step is one sample."""
    task = Task(classification_loss, {"mine": of_one_alone}, higher_is_better=True)
    with pytest.raises(OwnCodeError, match=r"metric 'mine', of a batch .* raised") as caught:
        evaluate(net, task, data, DataConfig(), TrainConfig(eval_batch_size=5), ALONE)
    assert "of_one_alone" in caught.value.traceback
    assert owners(caught.value.traceback) == {"user"}


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_any_number_of_ranks_counts_the_same(
    net: nn.Module, data: Counted, world_size: int, monkeypatch: Patch
) -> None:
    """Ranks take turns in this process: first each says its part, then all hear all parts."""
    expected = run(net, data, 2, ALONE, uneven_loss)
    worlds = [World(rank, world_size, torch.device("cpu")) for rank in range(world_size)]
    data.asked.clear()
    texts: list[str] = []
    states: list[bytes] = []

    def note(world: World, text: str) -> list[str]:
        texts.append(text)
        return [json.dumps({"rows": [[0, 1, 0.0]], "classes": [[0, 1]]})]

    def note_states(world: World, data: bytes) -> list[bytes]:
        states.append(data)
        return [data]

    monkeypatch.setattr(evaluation, "gather_text", note)
    monkeypatch.setattr(evaluation, "gather_bytes", note_states)
    for world in worlds:
        run(net, data, 2, world, uneven_loss)
    assert data.asked == Counter(range(NUM_SAMPLES))
    monkeypatch.setattr(evaluation, "gather_text", lambda world, text: list(texts))
    monkeypatch.setattr(evaluation, "gather_bytes", lambda world, data: list(states))
    assert all(run(net, data, 2, world, uneven_loss) == expected for world in worlds)


@pytest.mark.parametrize(("num_classes", "headed"), [(2, False), (5, True), (6, False), (10, True)])
def test_count_correct(num_classes: int, headed: bool) -> None:
    generator = torch.Generator().manual_seed(num_classes)
    # No ties: each row is an order of its classes.
    rows = [torch.randperm(num_classes, generator=generator) for _ in range(40)]
    logits = torch.stack(rows).float()
    labels = torch.randint(0, num_classes, (40,), generator=generator)
    pairs = zip(logits.tolist(), labels.tolist(), strict=True)
    better = [sum(value > row[label] for value in row) for row, label in pairs]
    outputs = HeadedLogits(logits, -logits, -logits) if headed else logits
    top1, top5 = count_correct(outputs, labels)
    assert top1.dtype == top5.dtype == torch.float32
    assert top1.item() == sum(count == 0 for count in better)
    assert top5.item() == sum(count < 5 for count in better)
