"""A user's own data set: looked at before a training, and at every batch.

What is wrong with it is told in one line, as a file's faults are.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from firecaffe.data.dataset import Dataset, TensorDataset
from firecaffe.data.decoded import DecodedSet
from firecaffe.data.packed import RawPart
from firecaffe.errors import DataError

MEMBERS = ("sample_CHW", "num_classes", "__len__", "batch")
EXPECTED = (
    "expected firecaffe.TensorDataset(images, labels), or an object with sample_CHW, num_classes, "
    "__len__() and batch(indices)"
)
DTYPES = (torch.uint8, torch.float32)


def check_own(name: str, dataset: Any) -> Dataset:
    """The data set that a user has given as `name`, with its batches looked at.

    Raises: DataError if it is none.
    """
    if isinstance(dataset, TensorDataset | DecodedSet | RawPart):
        return dataset
    kind = _kind(dataset)
    missing = [member for member in MEMBERS if not hasattr(dataset, member)]
    if kind or missing:
        lacking = kind or f"{_name_of(dataset)}, which lacks {', '.join(missing)}"
        raise DataError(f"{name} is {lacking}; {EXPECTED}")
    shape = dataset.sample_CHW
    if not (
        isinstance(shape, Sequence)
        and len(shape) == 3
        and all(isinstance(each, int) and each > 0 for each in shape)
    ):
        raise DataError(f"{name}.sample_CHW is {shape!r}; expected (channels, rows, columns)")
    count = dataset.num_classes
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise DataError(f"{name}.num_classes is {count!r}; expected a whole number from 1")
    try:
        length = len(dataset)
    except (TypeError, ValueError) as error:  # what len() itself refuses
        raise DataError(f"{name} has no length: {error}") from error
    if length == 0:
        raise DataError(f"{name} holds no sample")
    own = OwnDataset(name, dataset)
    own.batch(torch.tensor([0]))
    return own


def _kind(dataset: Any) -> str:
    """What was given by mistake; empty if that cannot be said."""
    if isinstance(dataset, type):
        return f"the class {dataset.__qualname__}, not one that is made of it"
    if isinstance(dataset, DataLoader):
        return "a torch DataLoader, whose batches come in an order of their own"
    if hasattr(dataset, "batch"):
        return ""
    if isinstance(dataset, TorchDataset):
        return f"a torch Dataset ({type(dataset).__name__}), whose samples come one at a time"
    if callable(dataset):
        return f"the function {getattr(dataset, '__qualname__', dataset)}, not what it returns"
    return ""


def _name_of(value: Any) -> str:
    word = type(value).__name__
    return f"{'an' if word[0].lower() in 'aeiou' else 'a'} {word}"


class OwnDataset:
    """A user's data set, each batch of which is as the protocol says, or a DataError tells why."""

    def __init__(self, name: str, dataset: Dataset) -> None:
        self.name, self.dataset = name, dataset
        channels, rows, columns = dataset.sample_CHW
        self.sample_CHW = (channels, rows, columns)
        self.num_classes = dataset.num_classes
        self.shard_counts: tuple[int, ...] = getattr(dataset, "shard_counts", ())

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, indices_B: Tensor) -> tuple[Tensor, Tensor]:
        given = self.dataset.batch(indices_B)
        if not (isinstance(given, tuple | list) and len(given) == 2):
            raise self._wrong(_name_of(given), "the pair (images, labels)")
        images, labels = given
        count = len(indices_B)
        for what, tensor in (("images", images), ("labels", labels)):
            if not isinstance(tensor, Tensor):
                raise self._wrong(f"{_name_of(tensor)} of {what}", "tensors")
            if tensor.device.type != "cpu":
                raise self._wrong(f"{what} on {tensor.device}", "them on the CPU")
        shape = (len(images) if images.ndim else 0, *self.sample_CHW)
        if images.dtype not in DTYPES or tuple(images.shape) != shape:
            raise self._wrong(
                f"images of {images.dtype}, {tuple(images.shape)}",
                f"uint8 or float32 of {(count, *self.sample_CHW)}",
            )
        if labels.dtype != torch.int64 or labels.ndim != 1:
            raise self._wrong(
                f"labels of {labels.dtype}, {tuple(labels.shape)}", f"int64 of {(count,)}"
            )
        wrong = labels[(labels < 0) | (labels >= self.num_classes)]
        if len(wrong):
            raise self._wrong(f"the label {int(wrong[0])}", f"0 to {self.num_classes - 1}")
        return images, labels

    def _wrong(self, found: str, expected: str) -> DataError:
        return DataError(f"{self.name}.batch() gave {found}; expected {expected}")
