"""The choice of a run's training samples: hold-out for validation, and drawing by weights.

The samples with the smallest `hash64(Stream.HOLD_OUT, sample)` are held out. Neither the seed nor
the workers change this, so trainings that are compared use the same samples.

`data.balance` draws an epoch's samples by weights; see `sample_order.WeightedDraws`. Weights become
integers whose sum is at most 2^52, so that sums are the same on every machine.
"""

from functools import partial

import torch
from torch import Tensor

from firecaffe.data.batches import fetchers_of
from firecaffe.data.dataset import (
    SET_FACTS,
    Batch,
    Dataset,
    Layout,
    TensorDataset,
    ask,
    copy_facts,
    layout_of,
    numbers_of,
)
from firecaffe.data.hash import Stream, hash64
from firecaffe.data.sample_order import WeightedDraws
from firecaffe.errors import DataError, RecipeError


def num_held_out(num_samples: int, share: float) -> int:
    """Return the number of held-out samples. Raises RecipeError if one of the parts is empty."""
    count = round(num_samples * share)
    if share and not 0 < count < num_samples:
        raise RecipeError(
            f"data.hold_out is {share:g}, which is {count} of {num_samples} training samples; "
            "expected some to train on and some to test on"
        )
    return count


def hold_out(train: Dataset, share: float) -> tuple[Dataset, Dataset]:
    """Return the remaining training samples and the held-out samples, both in original order."""
    by_hash = hash64(int(Stream.HOLD_OUT), torch.arange(len(train))).argsort()
    count = num_held_out(len(train), share)
    return _some(train, by_hash[count:].sort().values), _some(train, by_hash[:count].sort().values)


def _some(dataset: Dataset, samples_N: Tensor) -> Dataset:
    subset = getattr(dataset, "subset", partial(DatasetSubset, dataset))
    some: Dataset = subset(samples_N)
    return some


class DatasetSubset:
    """Some samples of a user's data set, renumbered. Their keys keep the original numbers."""

    def __init__(self, dataset: Dataset, samples_N: Tensor) -> None:
        self.dataset = dataset
        self.samples_N = samples_N
        copy_facts(self, dataset, SET_FACTS)

    @property
    def layout(self) -> Layout:
        return layout_of(self.dataset)

    @property
    def fetchers(self) -> int:
        return fetchers_of(self.dataset)

    @property
    def sample_weights(self) -> Tensor:
        return _own_weights(self.dataset)[self.samples_N]

    @property
    def targets(self) -> Tensor | None:
        of_all = labels_of(self.dataset)
        return None if of_all is None else of_all[self.samples_N]

    def __len__(self) -> int:
        return len(self.samples_N)

    def batch(self, indices_B: Tensor) -> Batch:
        return self.dataset.batch(self.samples_N[indices_B])

    def keyed_batch(self, indices_B: Tensor, seed: int, epoch: int) -> Batch:
        return ask(self.dataset, self.samples_N[indices_B], seed, epoch)


NONE, CLASSES, OWN = "none", "classes", "own"
BALANCES = (NONE, CLASSES, OWN)

SUM_BITS = 52


def weighted_draws(dataset: Dataset, balance: str) -> WeightedDraws | None:
    """Return how the samples of an epoch are drawn, or None if each is used once.

    Raises RecipeError if the data set states no classes or weights, DataError for invalid ones.
    """
    if balance == NONE:
        return None
    weights_N = _own_weights(dataset) if balance == OWN else _class_weights(dataset)
    if not bool((weights_N > 0).any()):
        raise DataError("sample_weights are all 0; expected some that are not")
    return WeightedDraws(whole(weights_N).cumsum(0))


def whole(weights_N: Tensor) -> Tensor:
    """Scale weights to integers. Positive weights stay positive."""
    count = len(weights_N)
    scale = float(2 ** (SUM_BITS - count.bit_length()))
    scaled_N = (weights_N / weights_N.max() * scale).floor().to(torch.int64)
    return torch.where(weights_N > 0, scaled_N.clamp(min=1), 0)


def _own_weights(dataset: Dataset) -> Tensor:
    given = getattr(dataset, "sample_weights", None)
    if given is None:
        raise RecipeError(
            "data.balance is own, but the data set has no sample_weights; expected a number for "
            "each sample"
        )
    weights_N = numbers_of("sample_weights", given, len(dataset)).double()
    wrong = (~(weights_N.isfinite() & (weights_N >= 0))).nonzero()
    if len(wrong):
        first = int(wrong[0])
        raise DataError(
            f"sample_weights[{first}] is {float(weights_N[first])}; expected finite, 0 or more"
        )
    return weights_N


def _class_weights(dataset: Dataset) -> Tensor:
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
    """Return each sample's class, int64 of (N,), or None. Raises DataError if they are invalid."""
    targets = getattr(dataset, "targets", None)
    is_said = isinstance(targets, Tensor) or not isinstance(dataset, TensorDataset)
    if targets is None or not is_said:
        return None
    classes_N = numbers_of("targets", targets, len(dataset))
    if classes_N.is_floating_point() or classes_N.dtype == torch.bool:
        raise DataError(
            f"targets are {classes_N.dtype}; data.balance classes expects whole numbers"
        )
    return classes_N.long()
