"""Regression: samples with numbers of any shape; squared, absolute or Huber's error."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from firecaffe.errors import RecipeError
from firecaffe.tasks.config import TaskConfig
from firecaffe.tasks.metrics import chosen
from firecaffe.tasks.outputs import aligned, own_loss
from firecaffe.tasks.task import Known, Task

LOSSES: dict[str, Callable[..., Tensor]] = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "huber": F.huber_loss,
}


def regression(
    config: TaskConfig, num_classes: int | None, *, loss: str = "mse", delta: float = 1.0
) -> Task:
    """Make the task. Targets and outputs are floating point of one shape, or (B, 1) and (B,).

    loss: A row of LOSSES. delta: The error from which on Huber's grows linearly.
    """
    if loss not in LOSSES:
        raise RecipeError(f"task.args.loss is {loss!r}; expected one of {', '.join(LOSSES)}")
    if delta <= 0:
        raise RecipeError(f"task.args.delta is {delta!r}; it must be more than 0")
    error = partial(LOSSES[loss], delta=delta) if loss == "huber" else LOSSES[loss]

    def mean_error(outputs: Any, targets: Tensor) -> Tensor:
        given = own_loss(outputs)
        return error(*aligned(outputs, targets)) if given is None else given

    metrics = chosen(config, "regression", Known(), ("mae", "rmse", "r2"))
    return Task(mean_error, metrics, config.metric)
