"""Validation samples that are held out from the training samples.

They are those with the smallest `hash64(Stream.HOLD_OUT, sample)`. Neither seeds nor workers change
this, so trainings that are compared use the same samples.
"""

import torch
from torch import Tensor

from firecaffe.data.batches import fetchers_of
from firecaffe.data.dataset import (
    OF_ITSELF,
    Batch,
    Dataset,
    Layout,
    TensorDataset,
    ask,
    layout_of,
    num_classes,
    take_facts,
)
from firecaffe.data.decode import DecodedSet, Encoded
from firecaffe.data.hash import Stream, hash64
from firecaffe.data.packed import RawPart
from firecaffe.errors import RecipeError


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
    """Return the remaining training samples and the held-out ones, each in the original order."""
    by_hash = hash64(int(Stream.HOLD_OUT), torch.arange(len(train))).argsort()
    count = num_held_out(len(train), share)
    return _some(train, by_hash[count:].sort().values), _some(train, by_hash[:count].sort().values)


def _some(dataset: Dataset, samples_N: Tensor) -> Dataset:
    if isinstance(dataset, TensorDataset):
        weights = dataset.sample_weights
        return TensorDataset(
            *dataset.batch(samples_N),
            num_classes(dataset),
            class_names=dataset.class_names,
            sample_weights=None if weights is None else torch.as_tensor(weights)[samples_N],
        )
    if isinstance(dataset, DecodedSet):
        _, side, _ = dataset.sample_CHW
        source = SomeEncoded(dataset.source, samples_N)
        return DecodedSet(source, side, dataset.threads, dataset.on_error, dataset.exif)
    if isinstance(dataset, RawPart):
        return RawPart(SomeEncoded(dataset.part, samples_N), dataset.sample_CHW)
    return SomeOfDataset(dataset, samples_N)


class SomeOfDataset:
    """Some samples of a user's data set, renumbered. Their keys have the original numbers."""

    def __init__(self, dataset: Dataset, samples_N: Tensor) -> None:
        self.dataset = dataset
        self.samples_N = samples_N
        take_facts(self, dataset, OF_ITSELF)

    @property
    def layout(self) -> Layout:
        return layout_of(self.dataset)

    @property
    def fetchers(self) -> int:
        return fetchers_of(self.dataset)

    def __len__(self) -> int:
        return len(self.samples_N)

    def batch(self, indices_B: Tensor) -> Batch:
        return self.dataset.batch(self.samples_N[indices_B])

    def keyed_batch(self, indices_B: Tensor, seed: int, epoch: int) -> Batch:
        return ask(self.dataset, self.samples_N[indices_B], seed, epoch)


class SomeEncoded:
    shard_counts: tuple[int, ...] = ()

    def __init__(self, source: Encoded, samples_N: Tensor) -> None:
        self.source = source
        self.samples_N = samples_N
        self.num_classes = source.num_classes
        self.class_names = source.class_names

    def __len__(self) -> int:
        return len(self.samples_N)

    def read(self, sample: int) -> bytes:
        return self.source.read(int(self.samples_N[sample]))

    def name(self, sample: int) -> str:
        return self.source.name(int(self.samples_N[sample]))

    def labels(self, samples_B: Tensor) -> Tensor:
        return self.source.labels(self.samples_N[samples_B])
