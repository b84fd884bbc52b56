"""A metric of an evaluation: what each batch comes to, and the value of what they come to together.

A batch's state depends on the batch alone, and states are put together in the order of the batches,
so that the value is the same bits on any number of workers.
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
    """What an evaluation asks of a metric."""

    @property
    def higher_is_better(self) -> bool | None:
        """None if nobody has said."""

    @property
    def is_share(self) -> bool:
        """Whether it is a share of 1, which is said in per cent."""

    @property
    def reductions(self) -> Mapping[str, Reduction]:
        """How the states of batches become one, by the name of the tensor."""

    def of_batch(self, outputs: Any, targets: Any) -> State:
        """The state of one batch, on the CPU."""

    def value(self, state: State, samples: int) -> float:
        """The value of the state of all batches, which have so many samples."""


@dataclass(frozen=True)
class Sums:
    """A metric that is computed from sums over the samples.

    Args:
        sums: (outputs, targets) to a tensor of sums over the samples of a batch. Those of batches
            are added in float64.
        value_of: The sums of all samples to the value; without it, the one sum divided by the
            number of samples.
        higher_is_better: Which way it is better; None if the task says so.
        is_share: Whether it is a share of 1, which is said in per cent.
    """

    sums: Callable[[Any, Any], Tensor]
    value_of: Callable[[Tensor], Any] | None = None
    higher_is_better: bool | None = None
    is_share: bool = False

    @property
    def reductions(self) -> Mapping[str, Reduction]:
        return {"sums": "sum"}

    def of_batch(self, outputs: Any, targets: Any) -> State:
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
        if self.value_of is not None:
            return one_number(self.value_of(state["sums"]))
        return float(state["sums"]) / samples


def one_number(found: Any) -> float:
    """Raises: RecipeError if it is none."""
    if isinstance(found, Tensor) and found.numel() == 1:
        return float(found)
    if isinstance(found, int | float):
        return float(found)
    told = f"{tuple(found.shape)} values" if isinstance(found, Tensor) else shown(found)
    raise RecipeError(f"it comes to {told}; expected one number, as of average='macro'")
