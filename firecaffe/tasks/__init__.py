"""The tasks that networks are trained for: a loss to lower, and metrics to count."""

from firecaffe.tasks.classification import CLASSIFICATION
from firecaffe.tasks.task import Loss, Task

__all__ = ["CLASSIFICATION", "Loss", "Task"]
