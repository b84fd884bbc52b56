"""Metrics of an evaluation: a state for each batch, and the value of all ranks' states combined.

A batch's state depends only on the batch, and states are combined in the order of the batches. So
the value has the same bits on any number of workers. A user's metric is a torchmetrics.Metric, a
Sums, or a plain function. The states of torchmetrics are read out, and set at the end. Sums of
floating point are in float64, whatever torchmetrics uses: a float32 of 2^24 does not change
if 1 is added.

States with the same result in any order (sums of whole numbers, minima, maxima) are combined at
once. The others are stored by batch and combined in the order of the batches: sums of floating
point, in float64, and concatenations.
"""

import copy
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import prod
from typing import Any, Literal, Protocol

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from firecaffe.errors import RecipeError
from firecaffe.tasks.outputs import prediction_of
from firecaffe.user_code import failed, shown

Reduction = Literal["sum", "cat", "min", "max"]
State = Mapping[str, Tensor]


class Metric(Protocol):
    """The interface of a metric for an evaluation."""

    @property
    def higher_is_better(self) -> bool | None:
        """Whether higher is better; None if that is not known."""

    @property
    def is_share(self) -> bool:
        """Whether it is a share of 1, which is shown in per cent."""

    @property
    def reductions(self) -> Mapping[str, Reduction]:
        """How the states of batches are combined, by tensor name."""

    def of_batch(self, outputs: Any, targets: Any) -> State:
        """Return the state of one batch, on the CPU."""

    def value(self, state: State, samples: int) -> float:
        """Return the value of the combined state of all batches, which have `samples` samples."""


@dataclass(frozen=True)
class Sums:
    """A metric that is computed from sums over the samples.

    Args:
        sums: A function of (outputs, targets) that returns a tensor of sums over a batch's samples.
            The sums of batches are added in float64.
        value_of: A function from the sums of all samples to the value. Without it, the value is the
            single sum divided by the number of samples.
        higher_is_better: Whether higher is better; None if the task says so.
        is_share: Whether it is a share of 1, which is shown in per cent.
    """

    sums: Callable[[Any, Any], Tensor]
    value_of: Callable[[Tensor], Any] | None = None
    higher_is_better: bool | None = None
    is_share: bool = False

    @property
    def reductions(self) -> Mapping[str, Reduction]:
        """The sums of batches are added."""
        return {"sums": "sum"}

    def of_batch(self, outputs: Any, targets: Any) -> State:
        """Return a batch's sums. Raises RecipeError for no tensor, or several but no `value_of`."""
        sums = self.sums(outputs, targets)
        if not isinstance(sums, Tensor):
            raise RecipeError(f"its function gave {shown(sums)}; expected a tensor of sums")
        if self.value_of is None and sums.numel() != 1:
            raise RecipeError(
                f"its function gave {tuple(sums.shape)}; expected one sum over the samples, or "
                "firecaffe.Sums(function, value_of=…), which makes one number of several"
            )
        return {"sums": sums.detach().to("cpu", torch.float64)}

    def value(self, state: State, samples: int) -> float:
        """Return the value of the sums over `samples` samples."""
        if self.value_of is not None:
            return one_number(self.value_of(state["sums"]))
        return float(state["sums"]) / samples


def one_number(found: Any) -> float:
    if isinstance(found, Tensor) and found.numel() == 1:
        return float(found)
    if isinstance(found, int | float):
        return float(found)
    described = f"{tuple(found.shape)} values" if isinstance(found, Tensor) else shown(found)
    raise RecipeError(f"it comes to {described}; expected one number, as of average='macro'")


Prepare = Callable[[Any, Any], tuple[Any, Any]]
"""A function from (outputs, targets) to the arguments of the metric."""


class TorchMetric:
    """A `torchmetrics.Metric` for evaluations on any number of workers."""

    def __init__(self, metric: Any, prepare: Prepare) -> None:
        """Copy `metric`. Raises RecipeError if its states cannot be combined batch by batch."""
        self.metric, self._prepare = copy.deepcopy(metric), prepare
        # All ranks have the same states. torchmetrics would add them up over the ranks.
        self.metric.sync_on_compute = self.metric._to_sync = False
        self.reductions = reductions_of(metric)
        self._states = list(metric._reductions)
        self.higher_is_better = metric.higher_is_better
        self.is_share = (metric.plot_lower_bound, metric.plot_upper_bound) == (0.0, 1.0)

    def of_batch(self, outputs: Any, targets: Any) -> State:
        prediction, targets = self._prepare(outputs, targets)
        metric = self.metric
        if isinstance(prediction, Tensor) and metric.device != prediction.device:
            metric.to(prediction.device)
        metric.reset()
        for name in self._states:
            start = getattr(metric, name)
            if isinstance(start, Tensor) and start.is_floating_point():
                setattr(metric, name, start.double())
        metric.update(prediction, targets)
        tensors: dict[str, Tensor] = {}
        for name in self._states:
            tensors |= _joined(name, getattr(metric, name))
        metric.reset()  # empties its lists
        return {name: tensor.detach().cpu() for name, tensor in tensors.items()}

    def value(self, state: State, samples: int) -> float:
        metric = self.metric.to("cpu")
        metric.reset()
        for name in self._states:
            if name in state:
                is_list = isinstance(getattr(metric, name), list)
                setattr(metric, name, _items(name, state) if is_list else state[name])
        metric._update_count = 1  # else it warns that it has no data
        result = metric.compute()
        metric.reset()
        return one_number(result)


SHAPES = ".shapes"
"""Suffix of the state with the shapes of a list's items: of each, how many sizes, and the sizes.

A metric may compute item by item, as of the boxes of one image each.
"""


def _joined(name: str, value: Tensor | list[Tensor]) -> dict[str, Tensor]:
    if isinstance(value, Tensor):
        return {name: value}
    if not value:
        return {}
    sizes = torch.tensor([size for item in value for size in (item.ndim, *item.shape)])
    return {name: torch.cat([item.reshape(-1) for item in value]), name + SHAPES: sizes}


def _items(name: str, state: State) -> list[Tensor]:
    numbers = iter(state[name + SHAPES].tolist())
    shapes = [tuple(islice(numbers, count)) for count in numbers]
    parts = torch.split(state[name], [prod(shape) for shape in shapes])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def reductions_of(metric: Any) -> Mapping[str, Reduction]:
    """Return how each state is combined over batches. Raises RecipeError if that is unsupported."""
    from torchmetrics.utilities import data

    known: dict[Any, Reduction] = {
        data.dim_zero_sum: "sum",
        data.dim_zero_cat: "cat",
        data.dim_zero_min: "min",
        data.dim_zero_max: "max",
    }
    name = type(metric).__name__
    reductions: dict[str, Reduction] = {}
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
        reductions[state] = "cat" if is_list else known[function]
        if is_list:
            reductions[state + SHAPES] = "cat"
    if not reductions:
        raise RecipeError(
            f"{name} has no state itself (it wraps other metrics); give those instead"
        )
    return reductions


def as_metric(name: str, given: Any) -> Metric:
    """Return a Metric for it. Raises RecipeError if it is none, or cannot be combined by batch."""
    if hasattr(type(given), "of_batch"):
        metric: Metric = given
        return metric
    # A user with a torchmetrics metric has loaded torchmetrics; others need not load it.
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is not None and isinstance(given, torchmetrics.Metric):
        try:
            return TorchMetric(given, lambda outputs, targets: (prediction_of(outputs), targets))
        except RecipeError as error:
            raise RecipeError(f"metric {name!r}: {error}") from None
    if callable(given) and not isinstance(given, type | nn.Module):
        return Sums(given)
    raise RecipeError(
        f"metric {name!r} is {shown(given)}; expected a torchmetrics.Metric, a firecaffe.Sums, or "
        "a function (outputs, targets) to the sum over the samples"
    )


ANY_ORDER = ""

Parts = dict[str, Tensor]
"""States by `metric/state/batch`, or `metric/state/` if the order does not matter."""


def add_batch(
    parts: Parts, metrics: Mapping[str, Metric], number: int, outputs: Any, targets: Any
) -> None:
    """Add the states of batch `number`. Raises RecipeError, or OwnCodeError for a user's metric."""
    for name, metric in metrics.items():
        for state, tensor in _of_batch(name, metric, outputs, targets).items():
            reduction = metric.reductions[state]
            is_float = tensor.is_floating_point()
            if reduction == "sum":
                tensor = tensor.to(torch.float64 if is_float else torch.int64)
            if reduction == "cat" or (reduction == "sum" and is_float):  # the order matters
                parts[f"{name}/{state}/{number}"] = tensor
            else:
                key = f"{name}/{state}/{ANY_ORDER}"
                parts[key] = _together([*([parts[key]] if key in parts else []), tensor], reduction)


def _of_batch(name: str, metric: Metric, outputs: Any, targets: Any) -> State:
    try:
        return metric.of_batch(outputs, targets)
    except RecipeError as error:
        raise RecipeError(f"metric {name!r}: {error}") from error
    except Exception as error:
        raise failed(f"metric {name!r}, of a batch of an evaluation,", error) from error


def pack(parts: Parts) -> bytes:
    return save({key: tensor.contiguous() for key, tensor in parts.items()})


def unpack(metrics: Mapping[str, Metric], of_ranks: Sequence[bytes]) -> dict[str, State]:
    """Combine all ranks' states, by metric. The result is equal for any number of ranks."""
    by_state: dict[tuple[str, str], list[tuple[int, Tensor]]] = defaultdict(list)
    for packed in of_ranks:
        for key, tensor in load(packed).items():
            name, state, number = key.split("/")
            by_state[name, state].append((int(number or 0), tensor))
    states: dict[str, dict[str, Tensor]] = {name: {} for name in metrics}
    for (name, state), tensors in by_state.items():
        in_order = [tensor for _, tensor in sorted(tensors, key=lambda pair: pair[0])]
        states[name][state] = _together(in_order, metrics[name].reductions[state])
    return dict(states)


def _together(tensors: Sequence[Tensor], reduction: Reduction) -> Tensor:
    if reduction == "cat":
        return torch.cat(list(tensors))
    result, *others = tensors
    for other in others:
        result = PAIRS[reduction](result, other)
    return result


PAIRS: dict[Reduction, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
}
