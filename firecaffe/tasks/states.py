"""The states of an evaluation's metrics: stored by batch, sent to other ranks, combined.

States with the same result in any order (sums of whole numbers, minima, maxima) are combined at
once. The others are stored by batch and combined in the order of the batches: sums of floating
point, in float64, and concatenations.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from firecaffe.errors import RecipeError
from firecaffe.tasks.metric import Metric, Reduction, State
from firecaffe.user_code import failed

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
            tensor = _exact(tensor) if reduction == "sum" else tensor
            if _keeps_order(tensor, reduction):
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


def _exact(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float64 if tensor.is_floating_point() else torch.int64)


def _keeps_order(tensor: Tensor, reduction: Reduction) -> bool:
    return reduction == "cat" or (reduction == "sum" and tensor.is_floating_point())


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
