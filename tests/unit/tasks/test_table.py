"""A task by its name: what the words of [task] ask for, and the mistakes in them."""

from typing import Any

import pytest
import torch
from torch import nn

from firecaffe import Recipe, TaskConfig
from firecaffe.errors import OwnCodeError, RecipeError
from firecaffe.models import ModelConfig
from firecaffe.tasks import TASKS, Task, task_of
from firecaffe.tasks.known_tasks import check_task
from firecaffe.tasks.metrics import METRICS, names_for
from firecaffe.training.checks import check_loss, check_metrics, check_prediction, check_shapes
from tests.kit.models_refused import refused
from tests.tracebacks import owners

OWN = "tests.unit.tasks.own"
OUTPUTS = torch.randn(1, 3, requires_grad=True)
LABEL = torch.tensor([1])


def made(config: TaskConfig, num_classes: int | None = 3) -> Any:
    check_task(config)
    return task_of(config, num_classes)


def masks(**args: Any) -> TaskConfig:
    return TaskConfig("segmentation", args=args)


def test_every_metric_is_of_a_task_and_every_task_has_some() -> None:
    assert all(set(row.of) <= set(TASKS) and row.of for row in METRICS.values())
    for name in TASKS:
        task = made(TaskConfig(name))
        assert set(task.metrics) <= set(names_for(name))
        assert task.measure.name == next(iter(task.metrics))


def test_what_the_words_ask_for() -> None:
    task = made(TaskConfig(metrics=["top1"], metric="f1"))
    assert (list(task.metrics), task.measure.name) == (["top1", "f1"], "f1")
    assert made(TaskConfig("regression", metric="loss")).measure.higher_is_better is False
    own = made(TaskConfig(f"{OWN}:good", args={"scale": 2.0}))
    assert own.measure.name == "right"
    assert own.loss(OUTPUTS, LABEL) == 2 * nn.functional.cross_entropy(OUTPUTS, LABEL)
    asked = made(TaskConfig(f"{OWN}:good", metrics=["mean"], metric="loss"))
    assert (list(asked.metrics), asked.measure.name) == (["mean"], "loss")


MISTAKES: dict[str, tuple[TaskConfig, list[str]]] = {
    "a name": (TaskConfig("segmentatoin"), ["task.name", "'segmentatoin'", "segmentation?"]),
    "a metric": (TaskConfig(metrics=["F1"]), ["task.metrics", "'F1'", "f1"]),
    "another task's metric": (TaskConfig("regression", metric="top1"), ["task.metric", "mae"]),
    "smoothing": (TaskConfig(label_smoothing=1.0), ["task.label_smoothing is 1"]),
    "a weight": (TaskConfig(class_weights=[1.0, -2.0]), ["task.class_weights", "-2"]),
    "no weight": (TaskConfig(class_weights=[0.0, 0.0]), ["task.class_weights"]),
    "weights": (TaskConfig(class_weights=[1.0, 2.0]), ["task.class_weights has 2", "3 classes"]),
    "an argument": (masks(ignore_indx=3), ["task.args", "'ignore_indx'", "ignore_index?"]),
    "an argument's kind": (masks(ignore_index="x"), ["task.args.ignore_index", "'x'"]),
    "a loss": (TaskConfig("regression", args={"loss": "l2"}), ["task.args.loss", "'l2'", "mse"]),
    "no task": (TaskConfig(f"{OWN}:no_task"), ["'cross entropy'", "firecaffe.Task"]),
    "an own argument": (
        TaskConfig(f"{OWN}:good", args={"size": 1}),
        ["task.name", "size=1", "scale"],
    ),
    "a metric's name": (TaskConfig(f"{OWN}:called_loss"), ["'loss'", "metric"]),
    "a direction": (TaskConfig(f"{OWN}:of_lower"), [OWN, "'error'", "lower is better"]),
    "no direction": (
        TaskConfig(f"{OWN}:good", args={"better": None}),
        ["'right'", "higher_is_better"],
    ),
    "an own metric": (TaskConfig(f"{OWN}:good", metric="rigth"), ["task.metric", "right?"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line(mistake: str) -> None:
    config, parts = MISTAKES[mistake]
    with refused(RecipeError, parts):
        made(config)


def test_metrics_that_take_classes_ask_for_their_number() -> None:
    with pytest.raises(RecipeError, match=r"task\.args = \{ num_classes = N \}"):
        made(masks(), None)
    made(masks(num_classes=3), None)
    made(TaskConfig(), None)


def looked_at(config: TaskConfig, outputs: Any = OUTPUTS, targets: Any = LABEL) -> None:
    recipe = Recipe(model=ModelConfig("mine"), task=config)
    task = made(config)
    check_prediction(task, outputs, recipe)
    check_loss(task, outputs, targets, recipe, is_own=False)
    check_metrics(task, outputs, targets, recipe, is_own=False)


@pytest.mark.parametrize(
    ("config", "outputs", "parts"),
    [
        (TaskConfig(), OUTPUTS[:, :2], ["'mine'", "(1, 2)", "(samples, 3)"]),
        (TaskConfig(), {"scores": OUTPUTS}, ["'mine'", "scores", "logits"]),
        (TaskConfig("multilabel"), OUTPUTS, ["targets", "(1, 3)", "(1,)"]),
        (masks(), OUTPUTS, ["'mine'", "(samples, 3, rows, columns)"]),
        (TaskConfig("regression"), OUTPUTS, ["(1, 3)", "(1,)"]),
        (TaskConfig(metrics=["f1"]), torch.cat([OUTPUTS, OUTPUTS], 1), ["'f1'", "6", "3"]),
        (TaskConfig(f"{OWN}:two_losses"), OUTPUTS, [OWN, "tuple of 2", "GAN", "one number"]),
        (TaskConfig(f"{OWN}:nan"), OUTPUTS, [f"task.name '{OWN}:nan'", "nan", "first sample"]),
    ],
)
def test_what_the_network_gives_does_not_fit(
    config: TaskConfig, outputs: Any, parts: list[str]
) -> None:
    with refused(RecipeError, parts):
        looked_at(config, outputs)


@pytest.mark.parametrize(
    ("function", "error"),
    [("fails", "KeyError"), ("loss_fails", "LookupError"), ("metric_fails", "LookupError")],
)
def test_what_own_code_raises_is_shown_with_its_traceback(function: str, error: str) -> None:
    with refused(OwnCodeError, [error, f"task.name '{OWN}:{function}'"]) as caught:
        looked_at(TaskConfig(f"{OWN}:{function}"))
    assert "own.py" in caught.value.traceback
    assert owners(caught.value.traceback) == {"user"}


def test_shapes_are_known_without_values() -> None:
    outputs = torch.empty(4, 2, device="meta")
    with pytest.raises(RecipeError, match="logits of"):
        check_shapes(made(TaskConfig()), outputs, None, Recipe())
    for name, shape, targets in (
        ("regression", (4, 2), (4, 3)),
        ("multilabel", (4, 3), (4,)),
        ("segmentation", (4, 3, 5, 5), (4, 6, 5)),
    ):
        config = TaskConfig(name)
        given, wanted = (torch.empty(*sizes, device="meta") for sizes in (shape, targets))
        with pytest.raises(RecipeError, match=rf"{name} takes .*targets"):
            check_shapes(made(config), given, wanted, Recipe(task=config))
    config = TaskConfig(f"{OWN}:loss_fails")
    check_shapes(made(config), outputs, outputs, Recipe(task=config))


def test_a_metric_that_counts_in_an_attribute_is_refused() -> None:
    """No rank has the count of another's batches, and no reset empties it."""
    from tests.unit.tasks.of_torchmetrics import Counting, Pixels

    entropy = torch.nn.functional.cross_entropy
    check_metrics(Task(entropy, {"mine": Pixels()}), OUTPUTS, LABEL, Recipe(), is_own=True)
    with refused(RecipeError, ["'mine'", "batches"]):
        check_metrics(Task(entropy, {"mine": Counting()}), OUTPUTS, LABEL, Recipe(), is_own=True)
