"""Metrics batch by batch and rank by rank, against torchmetrics over all samples at once."""

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from firecaffe.errors import RecipeError
from firecaffe.runs.measure import Measure
from firecaffe.tasks import Sums, Task, TaskConfig, task_of
from firecaffe.tasks.metric import Metric, Parts, add_batch, pack, unpack
from firecaffe.tasks.metrics import METRICS
from tests.kit.models_refused import refused

GENERATOR = torch.Generator().manual_seed(0)
NUM = 53
LOGITS = torch.randn(NUM, 4, generator=GENERATOR)
LABELS = torch.randint(0, 4, (NUM,), generator=GENERATOR)
SETS = (torch.randn(NUM, 4, generator=GENERATOR) > 0).int()
PIXELS = torch.randn(NUM, 3, 5, 4, generator=GENERATOR)
MASKS = torch.randint(0, 3, (NUM, 5, 4), generator=GENERATOR)
MASKS[MASKS == 1] = torch.where(
    torch.rand(int((MASKS == 1).sum()), generator=GENERATOR) < 0.2, 255, 1
)
NUMBERS = LOGITS * 2 + torch.randn(NUM, 4, generator=GENERATOR)

DATA: dict[str, tuple[Tensor, Tensor, dict[str, Any]]] = {
    "classification": (LOGITS, LABELS, {}),
    "multilabel": (LOGITS, SETS, {}),
    "segmentation": (PIXELS, MASKS, {"ignore_index": 255}),
    "regression": (LOGITS, NUMBERS, {}),
}
CLASSES = {"classification": 4, "multilabel": 4, "segmentation": 3, "regression": None}


def values(
    metrics: Mapping[str, Metric], outputs: Any, targets: Tensor, ranks: int, size: int = 7
) -> dict[str, float]:
    """As an evaluation on so many ranks puts them together, each having every so many-th batch."""
    of_ranks: list[Parts] = [{} for _ in range(ranks)]
    for number, start in enumerate(range(0, len(targets), size)):
        part = slice(start, start + size)
        add_batch(of_ranks[number % ranks], metrics, number, outputs[part], targets[part])
    states = unpack(metrics, [pack(parts) for parts in of_ranks])
    return {name: metric.value(states[name], len(targets)) for name, metric in metrics.items()}


def test_a_class_that_there_is_not_is_named() -> None:
    config = TaskConfig("segmentation", args={"ignore_index": 255})
    metrics = task_of(config, 3).measured
    with refused(RecipeError, ["mean_iou", "class 3", "0 to 2"]):
        values(metrics, PIXELS, torch.where(MASKS == 2, 3, MASKS), 1)


def test_a_sample_alone_has_no_correlation() -> None:
    """An evaluation of one sample does not end a training."""
    config = TaskConfig("regression", metrics=["mae", "r2", "spearman"])
    found = values(task_of(config, None).measured, LOGITS[:1], NUMBERS[:1], 1)
    assert [math.isnan(found[name]) for name in config.metrics] == [False, True, True]


@pytest.mark.parametrize("task", DATA)
def test_workers_change_no_bit_of_any_metric(task: str) -> None:
    outputs, targets, args = DATA[task]
    names = [name for name, row in METRICS.items() if task in row.of]
    config = TaskConfig(task, args=args, metrics=names)
    metrics = task_of(config, CLASSES[task]).measured
    alone = values(metrics, outputs, targets, 1)
    assert set(alone) == set(names)
    for ranks in (2, 3, 20):  # more than batches: some have none
        assert values(metrics, outputs, targets, ranks) == alone
    assert values(metrics, outputs, targets, 1, size=NUM) == pytest.approx(alone, rel=1e-5)


def test_against_torchmetrics_over_all_samples() -> None:
    from tests.unit.tasks.of_torchmetrics import REFERENCES

    for label, (theirs, see) in REFERENCES.items():
        task, name = label.split()
        outputs, targets, args = DATA[task]
        ours = task_of(TaskConfig(task, args=args, metrics=[name]), CLASSES[task])
        theirs.update(see(outputs) if see else outputs, targets)
        value = values(ours.measured, outputs, targets, 3)[name]
        assert value == pytest.approx(theirs.compute().item(), rel=1e-5), label
        assert ours.measure.higher_is_better == theirs.higher_is_better, label


def test_probabilities_do_not_depend_on_a_batch_s_logits() -> None:
    """torchmetrics takes what lies in 0 to 1 for probabilities, batch by batch."""
    logits = torch.tensor([[0.1, 0.9], [3.0, -3.0], [0.6, 0.4], [-1.0, 2.0]])
    labels = torch.tensor([1, 0, 1, 0])
    metrics = task_of(TaskConfig(metrics=["auroc"]), 2).measured
    assert len({tuple(values(metrics, logits, labels, 1, size).items()) for size in (1, 2, 4)}) == 1


def test_float32_sums_beyond_2_to_the_24_are_exact() -> None:
    from tests.unit.tasks.of_torchmetrics import Pixels

    task = Task(CLASSIFICATION_LOSS, {"pixels": Pixels()})
    assert values(task.measured, LOGITS, LABELS, 3)["pixels"] == 8  # batches of 7


@pytest.mark.parametrize("reduction", [None, "cat"])
def test_a_list_of_a_metric_keeps_its_items(reduction: str | None) -> None:
    from tests.unit.tasks.of_torchmetrics import PerSample

    theirs = PerSample(reduction)
    theirs.update(LOGITS, LABELS)
    task = Task(CLASSIFICATION_LOSS, {"mine": PerSample(reduction)})
    for ranks in (1, 3):
        value = values(task.measured, LOGITS, LABELS, ranks)["mine"]
        assert value == pytest.approx(theirs.compute().item())


CLASSIFICATION_LOSS = torch.nn.CrossEntropyLoss()


def right(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs.argmax(1) == labels).sum()


def moments(outputs: Tensor, targets: Tensor) -> Tensor:
    return torch.stack([outputs.sum(), (outputs**2).sum(), torch.tensor(1e-8)])


def test_own_sums() -> None:
    spread = Sums(moments, lambda sums: sums[1] - sums[0] ** 2 / NUM, higher_is_better=False)
    task = Task(CLASSIFICATION_LOSS, {"right": right, "spread": spread}, metric="spread")
    alone = values(task.measured, LOGITS, LABELS, 1)
    assert alone["right"] == (LOGITS.argmax(1) == LABELS).sum().item() / NUM
    exact = LOGITS.double()
    assert alone["spread"] == pytest.approx((exact**2).sum() - exact.sum() ** 2 / NUM)
    assert values(task.measured, LOGITS, LABELS, 3) == alone
    assert task.measure == Measure("spread", False, False)


def test_of_five_classes_top5_is_measured_if_it_is_named() -> None:
    of_five, of_six, of_some = (task_of(TaskConfig(), count) for count in (5, 6, None))
    for task in (of_five, of_some):  # there may be fewer where the data do not say
        assert (list(task.metrics), task.counted) == (["top1"], ("top1",))
    assert (list(of_six.metrics), of_six.counted) == (["top1", "top5"], ("top1", "top5"))
    assert of_five.counts is not None
    assert of_five.counts.count(LOGITS, LABELS).tolist() == [right(LOGITS, LABELS)]
    named = task_of(TaskConfig(metrics=["top5"]), 5)
    assert values(named.measured, LOGITS, LABELS, 1) == {"top5": 1.0}


def test_own_metrics_say_whether_they_are_shares() -> None:
    from tests.unit.tasks.of_torchmetrics import REFERENCES, f1

    near = Sums(right, higher_is_better=True, is_share=True)
    error, _ = REFERENCES["regression mae"]
    metrics = {"near": near, "right": right, "f1": f1(), "error": error}
    task = Task(CLASSIFICATION_LOSS, metrics)
    assert task.shares == ["near", "f1"]
    assert task.measure == Measure("near", True, True)
    assert task.measure.shown(0.5) == "50.00%"


def test_a_metric_that_cannot_be() -> None:
    from tests.unit.tasks.of_torchmetrics import REFUSED

    for metric, parts in REFUSED:
        with refused(RecipeError, parts):
            _ = Task(CLASSIFICATION_LOSS, {"mine": metric}).measured


@pytest.mark.parametrize("of", ["torchmetrics", "ours"])
def test_a_value_that_is_not_one_number(of: str) -> None:
    from tests.unit.tasks.of_torchmetrics import f1

    metric = f1(average=None) if of == "torchmetrics" else Sums(moments, lambda sums: sums)
    with pytest.raises(RecipeError, match=r"\([34],\) values"):
        values(Task(CLASSIFICATION_LOSS, {"mine": metric}).measured, LOGITS, LABELS, 1)
