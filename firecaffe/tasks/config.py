"""The recipe's [task] section."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class TaskConfig:
    """What the network is trained for.

    Args:
        name: classification, multilabel, regression or segmentation (docs/tasks.md); a function
            of your own that returns a firecaffe.Task, as package.module:function or
            path/file.py:function; or the losses of a net of Caffe's, as caffe:PATH/net.prototxt.
        args: What an own task's function is called with, and the words that a task of ours has of
            its own, as { ignore_index = 255 }; docs/tasks.md lists them.
        label_smoothing: Share of the loss that all classes have in common, below 1.
        class_weights: A factor of the loss for each class; of multilabel, of the samples that have
            the label. Empty: 1 for all.
        metrics: What evaluations measure. Empty: the task's own choice.
        metric: The one of them that chooses: what `compare` and `tune` go by, or loss. Empty: the
            first.
    """

    name: str = "classification"
    args: dict[str, Any] = field(default_factory=dict)
    label_smoothing: float = 0.0
    class_weights: list[float] = field(default_factory=list)
    metrics: list[str] = field(default_factory=list)
    metric: str = ""
