"""Weights by which the samples of an epoch are drawn (`data.balance`), from what a data set says.

They are made whole numbers, of 2^52 together at most, so that their sums are the same on every
machine; see `order.Drawing`.
"""

from typing import Any

import torch
from torch import Tensor

from firecaffe.data.dataset import Dataset, TensorDataset
from firecaffe.data.decoded import DecodedSet
from firecaffe.data.hold_out import SomeOfDataset
from firecaffe.data.order import Drawing
from firecaffe.data.packed import RawPart
from firecaffe.errors import DataError, RecipeError

NONE, CLASSES, OWN = "none", "classes", "own"
BALANCES = (NONE, CLASSES, OWN)
"""Every sample once; every class as often; by the data set's own weights."""

SUM_BITS = 52


def drawing_of(dataset: Dataset, balance: str) -> Drawing | None:
    """How the samples of an epoch are drawn; None if each comes once.

    Raises: RecipeError if the data set says neither classes nor weights; DataError if they are
    none.
    """
    if balance == NONE:
        return None
    weights_N = _own_weights(dataset) if balance == OWN else _class_weights(dataset)
    if not bool((weights_N > 0).any()):
        raise DataError("sample_weights are all 0; expected some that are not")
    return Drawing(whole(weights_N).cumsum(0))


def whole(weights_N: Tensor) -> Tensor:
    """Weights as whole numbers; what is above 0 stays so."""
    count = len(weights_N)
    scale = float(2 ** (SUM_BITS - count.bit_length()))
    scaled_N = (weights_N / weights_N.max() * scale).floor().to(torch.int64)
    return torch.where(weights_N > 0, scaled_N.clamp(min=1), 0)


def _own_weights(dataset: Dataset) -> Tensor:
    if isinstance(dataset, SomeOfDataset):
        return _own_weights(dataset.dataset)[dataset.samples_N]
    found = getattr(dataset, "sample_weights", None)
    if found is None:
        raise RecipeError(
            "data.balance is own, but the data set has no sample_weights; expected a number for "
            "each sample"
        )
    weights_N = _numbers("sample_weights", found, len(dataset)).double()
    wrong = (~(weights_N.isfinite() & (weights_N >= 0))).nonzero()
    if len(wrong):
        first = int(wrong[0])
        raise DataError(
            f"sample_weights[{first}] is {float(weights_N[first])}; expected finite, 0 or more"
        )
    return weights_N


def _class_weights(dataset: Dataset) -> Tensor:
    """The inverse of how many samples are of the same class."""
    classes_N = labels_of(dataset)
    if classes_N is None:
        raise RecipeError(
            "data.balance is classes, but the data set does not say them; expected targets, the "
            "class of each sample, or data.balance own with sample_weights"
        )
    least = int(classes_N.min())
    if least < 0:
        raise DataError(f"targets has the class {least}; expected numbers from 0")
    return 1.0 / torch.bincount(classes_N).double()[classes_N]


def labels_of(dataset: Dataset) -> Tensor | None:
    """The class of each sample, int64 of (N,); None where the data set does not say it.

    Raises: DataError if it says something else.
    """
    if isinstance(dataset, SomeOfDataset):
        of_all = labels_of(dataset.dataset)
        return None if of_all is None else of_all[dataset.samples_N]
    if isinstance(dataset, DecodedSet):
        return dataset.source.labels(torch.arange(len(dataset)))
    if isinstance(dataset, RawPart):
        return dataset.part.labels(torch.arange(len(dataset)))
    found = getattr(dataset, "targets", None)
    is_said = isinstance(found, Tensor) or not isinstance(dataset, TensorDataset)
    if found is None or not is_said:
        return None
    classes_N = _numbers("targets", found, len(dataset))
    if classes_N.is_floating_point() or classes_N.dtype == torch.bool:
        raise DataError(
            f"targets are {classes_N.dtype}; data.balance classes expects whole numbers"
        )
    return classes_N.long()


def _numbers(name: str, found: Any, count: int) -> Tensor:
    try:
        numbers_N = torch.as_tensor(found)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{name} are no numbers ({error}); expected one for each sample") from error
    if numbers_N.shape != (count,):
        raise DataError(
            f"{name} have shape {tuple(numbers_N.shape)}; expected one for each of {count} samples"
        )
    return numbers_N
