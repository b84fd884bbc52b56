"""A metric of torchmetrics, batch by batch: its states are read out, and set at the end.

Sums of floating point are in float64, whatever torchmetrics uses: a float32 of 2^24 does not change
if 1 is added.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from firecaffe.errors import RecipeError
from firecaffe.tasks.metric import Reduction, State, one_number

Prepare = Callable[[Any, Any], tuple[Any, Any]]
"""A function from (outputs, targets) to the arguments of the metric."""


class TorchMetric:
    """A `torchmetrics.Metric` for evaluations on any number of workers."""

    def __init__(
        self, metric: Any, prepare: Prepare, higher: bool | None = None, share: bool | None = None
    ) -> None:
        """Copy `metric`. Raises RecipeError if its states cannot be combined batch by batch."""
        self._metric, self._prepare = copy.deepcopy(metric), prepare
        # All ranks have the same states. torchmetrics would add them up over the ranks.
        self._metric.sync_on_compute = self._metric._to_sync = False
        self.reductions = reductions_of(metric)
        self.higher_is_better = metric.higher_is_better if higher is None else higher
        bounds = metric.plot_lower_bound, metric.plot_upper_bound
        self.is_share = bounds == (0.0, 1.0) if share is None else share

    def of_batch(self, outputs: Any, targets: Any) -> State:
        prediction, targets = self._prepare(outputs, targets)
        metric = self._metric
        if isinstance(prediction, Tensor) and metric.device != prediction.device:
            metric.to(prediction.device)
        metric.reset()
        for name in self.reductions:
            start = getattr(metric, name)
            if isinstance(start, Tensor) and start.is_floating_point():
                setattr(metric, name, start.double())
        metric.update(prediction, targets)
        found = {name: _joined(getattr(metric, name)) for name in self.reductions}
        metric.reset()  # empties its lists
        return {name: each.detach().cpu() for name, each in found.items() if each is not None}

    def value(self, state: State, samples: int) -> float:
        metric = self._metric.to("cpu")
        metric.reset()
        for name in self.reductions:
            if name in state:
                is_list = isinstance(getattr(metric, name), list)
                setattr(metric, name, [state[name]] if is_list else state[name])
        metric._update_count = 1  # else it warns that it has no data
        found = metric.compute()
        metric.reset()
        return one_number(found)


def _joined(value: Tensor | list[Tensor]) -> Tensor | None:
    if isinstance(value, Tensor):
        return value
    if not value:
        return None
    return torch.cat([each.reshape(1) if each.ndim == 0 else each for each in value])


def reductions_of(metric: Any) -> Mapping[str, Reduction]:
    """Return how each state is combined over batches. Raises RecipeError for unsupported ways."""
    from torchmetrics.utilities import data

    known: dict[Any, Reduction] = {
        data.dim_zero_sum: "sum",
        data.dim_zero_cat: "cat",
        data.dim_zero_min: "min",
        data.dim_zero_max: "max",
    }
    name = type(metric).__name__
    found: dict[str, Reduction] = {}
    for state, function in metric._reductions.items():
        is_list = isinstance(metric._defaults[state], list)
        if function not in known and not (function is None and is_list):
            way = (
                "mean" if function is data.dim_zero_mean else getattr(function, "__name__", "none")
            )
            raise RecipeError(
                f"the state {state} of {name} is put together by {way}; only sum, cat, min and max "
                "give the same value on any number of workers"
            )
        found[state] = known.get(function, "cat")
    if not found:
        raise RecipeError(
            f"{name} has no state of its own (it wraps other metrics); give those instead"
        )
    return found
