"""The recipe's [task] section, and tasks: a loss to minimize, and metrics to measure."""

from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from firecaffe.tasks.built_in_tasks import CLASSIFICATION as CLASSIFICATION
    from firecaffe.tasks.known_tasks import TASKS as TASKS
    from firecaffe.tasks.known_tasks import task_of as task_of
    from firecaffe.tasks.metric import Sums as Sums
    from firecaffe.tasks.task import Loss as Loss
    from firecaffe.tasks.task import Task as Task

_PLACES = {
    "CLASSIFICATION": "built_in_tasks",
    "Loss": "task",
    "Sums": "metric",
    "TASKS": "known_tasks",
    "Task": "task",
    "task_of": "known_tasks",
}
"""The module of each name. It is imported on first use, as reading a recipe needs no torch."""

__all__ = sorted([*_PLACES, "TaskConfig"])

OWN_TASK = "own task"
"""The name that a run's recipe records for a task that a script passed to `train`."""


@dataclass(frozen=True)
class TaskConfig:
    """The task that the network is trained for.

    Args:
        name: classification, multilabel, regression or segmentation (docs/reference/tasks.md); a
            function of your own that returns a firecaffe.Task, as package.module:function or
            path/file.py:function; or the losses of a Caffe net, as caffe:PATH/net.prototxt.
        args: Arguments of your own task's function, or further settings of a built-in task, as
            { ignore_index = 255 }; docs/reference/tasks.md lists them.
        label_smoothing: Share of the loss that is spread equally over all classes, below 1.
        class_weights: A factor of the loss for each class; for multilabel, of the samples that have
            the label. Empty: 1 for all.
        metrics: The metrics that evaluations measure. Empty: the task's default.
        metric: The metric, or loss, by which `compare` and `tune` choose. Empty: the first metric.
    """

    name: str = "classification"
    args: dict[str, Any] = field(default_factory=dict)
    label_smoothing: float = 0.0
    class_weights: list[float] = field(default_factory=list)
    metrics: list[str] = field(default_factory=list)
    metric: str = ""


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
