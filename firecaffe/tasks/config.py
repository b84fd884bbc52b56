"""The recipe's [task] section."""

from dataclasses import dataclass, field
from typing import Any

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
