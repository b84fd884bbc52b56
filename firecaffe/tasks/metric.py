"""Metrics of an evaluation: a state for each batch, and the value of all states combined.

A batch's state depends only on the batch, and states are combined in the order of the batches. So
the value has the same bits on any number of workers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from firecaffe.errors import RecipeError
from firecaffe.reference import shown

Reduction = Literal["sum", "cat", "min", "max"]
State = Mapping[str, Tensor]


class Metric(Protocol):
    """The interface of a metric for an evaluation."""

    @property
    def higher_is_better(self) -> bool | None:
        """Whether higher is better; None if nobody has said."""

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
        """Return the sums of one batch.

        Raises:
            RecipeError: The function returned no tensor, or no single sum where one is needed.
        """
        found = self.sums(outputs, targets)
        if not isinstance(found, Tensor):
            raise RecipeError(f"its function gave {shown(found)}; expected a tensor of sums")
        if self.value_of is None and found.numel() != 1:
            raise RecipeError(
                f"its function gave {tuple(found.shape)}; expected one sum over the samples, or "
                "firecaffe.Sums(function, value_of=…), which makes one number of several"
            )
        return {"sums": found.detach().to("cpu", torch.float64)}

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
    told = f"{tuple(found.shape)} values" if isinstance(found, Tensor) else shown(found)
    raise RecipeError(f"it comes to {told}; expected one number, as of average='macro'")
