"""The tasks that networks are trained for: a loss to minimize, and metrics to measure."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from firecaffe.tasks.built_in_tasks import CLASSIFICATION as CLASSIFICATION
    from firecaffe.tasks.config import TaskConfig as TaskConfig
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
    "TaskConfig": "config",
    "task_of": "known_tasks",
}
"""The module of each name. It is imported on first use, as reading a recipe needs no torch."""

__all__ = sorted(_PLACES)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
