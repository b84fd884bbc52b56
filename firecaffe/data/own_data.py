"""Checks of a user's data set, before training and at every batch. Errors are one line."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from threading import BoundedSemaphore
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves
from torch.utils.data import DataLoader, IterableDataset

from firecaffe.data.dataset import (
    ENDS,
    SAMPLE_FACTS,
    SET_FACTS,
    Batch,
    Dataset,
    Layout,
    TensorDataset,
    ask,
    copy_facts,
    is_images,
    leaf_of,
    map_batch,
    named_leaves,
    unusual,
)
from firecaffe.data.decode import StoredSet
from firecaffe.data.hash import EVALUATION, Key, Stream, keyed, under
from firecaffe.data.torch_set import TorchSet, from_torch, is_map_style
from firecaffe.errors import DataError, FirecaffeError
from firecaffe.generators import generators_kept, noticed
from firecaffe.user_code import failed
from firecaffe.value_checks import MAX_THREADS

EXPECTED = (
    "expected a torch Dataset, firecaffe.TensorDataset(inputs, targets), the pair "
    "(inputs, targets) of tensors, or an object with __len__() and batch(indices)"
)
DTYPES = (torch.uint8, torch.float32)


def check_own(name: str, dataset: Any) -> Dataset:
    """Return a user's data set, which checks each batch. Raises DataError, OwnCodeError."""
    if isinstance(dataset, TensorDataset | StoredSet):
        return dataset
    is_pair = isinstance(dataset, tuple | list) and len(dataset) == 2
    if is_pair and all(isinstance(leaf, Tensor) for leaf in tree_leaves(tuple(dataset))):
        return TensorDataset(*dataset)
    if is_pair and any(isinstance(leaf, np.ndarray) for leaf in tree_leaves(tuple(dataset))):
        raise DataError(f"{name} has numpy arrays; torch.from_numpy makes tensors of them")
    kind = _kind(dataset)
    if kind:
        raise DataError(f"{name} is {kind}; {EXPECTED}")
    given = dataset if hasattr(dataset, "batch") else from_torch(dataset)
    if isinstance(given, TorchSet):
        given = replace(given, items=replace(given.items, name=name))
        if given.workers:
            given.items.pickled()
    try:
        length = len(given)
    except (TypeError, ValueError) as error:  # raised by len() itself
        raise DataError(f"{name} has no length: {error}") from error
    except Exception as error:
        raise failed(f"{name}.__len__()", error) from error
    if length == 0:
        raise DataError(f"{name} holds no sample")
    return CheckedSet(name, given)


def share_limits(parts: Iterable[Dataset | None]) -> None:
    """Let parts that wrap the same user's data set share one semaphore."""
    turns: dict[int, BoundedSemaphore] = {}
    for part in parts:
        if isinstance(part, CheckedSet):
            part.turns = turns.setdefault(id(part.dataset), part.turns)


def _kind(dataset: Any) -> str:
    if isinstance(dataset, type):
        return f"the class {dataset.__qualname__}, not one that is made of it"
    if isinstance(dataset, DataLoader):
        return (
            "a torch DataLoader, whose batches come in its own order: give its dataset, or "
            "firecaffe.from_torch(loader.dataset, collate=loader.collate_fn)"
        )
    if isinstance(dataset, IterableDataset):
        return f"an IterableDataset ({type(dataset).__name__}), whose samples have no numbers"
    if hasattr(dataset, "batch") and hasattr(dataset, "__len__"):
        return ""
    if not hasattr(dataset, "batch") and is_map_style(dataset):
        return ""
    if callable(dataset):
        return f"the function {getattr(dataset, '__qualname__', dataset)}, not what it returns"
    members = ("__len__", "batch")
    missing = [member for member in members if not hasattr(dataset, member)]
    return f"{_name_of(dataset)}, which lacks {', '.join(missing) or 'batch'}"


def _name_of(value: Any) -> str:
    word = type(value).__name__
    return f"{'an' if word[0].lower() in 'aeiou' else 'a'} {word}"


class CheckedSet:
    """A user's data set that raises DataError for each batch that breaks the protocol.

    Images must match `sample_CHW` and `num_classes`; other samples must match sample 0. If
    `fetchers` is 0, the training thread calls the data set, which may draw from the process's
    generators: they are seeded by the batch's key and restored. Otherwise that many threads call
    it during training, and it must not use these generators, which the training also uses.
    """

    sample_CHW: tuple[int, int, int]
    num_classes: int

    def __init__(self, name: str, dataset: Dataset) -> None:
        self.name, self.dataset = name, dataset
        self._length = len(dataset)  # read once: all ranks must evaluate the same number
        copy_facts(self, dataset, (*SET_FACTS, *SAMPLE_FACTS))
        self.shard_counts: tuple[int, ...] = getattr(dataset, "shard_counts", ())
        self._check_facts()
        self.turns = BoundedSemaphore(self.fetchers or 1)
        """Limits the threads that call at once: an evaluation's run beside the training's."""
        self._found: Layout | None = None
        try:
            batch = self._first_batch()
        except ENDS as error:
            said = f"{type(error).__name__}: {error}"
            raise DataError(f"{name} has a length, and no sample 0 ({said})") from error
        if not is_images(self):
            self._found = Layout.of(batch)

    def _check_facts(self) -> None:
        shape = getattr(self, "sample_CHW", None)
        if shape is not None:
            if not (
                isinstance(shape, Sequence)
                and len(shape) == 3
                and all(isinstance(size, int) and size > 0 for size in shape)
            ):
                raise DataError(
                    f"{self.name}.sample_CHW is {shape!r}; expected (channels, rows, columns)"
                )
            if not hasattr(self, "num_classes"):
                raise DataError(
                    f"{self.name} has sample_CHW and no num_classes; images of classes have both, "
                    "other data no sample_CHW"
                )
            self.sample_CHW = (shape[0], shape[1], shape[2])
        count = getattr(self, "num_classes", 1)
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise DataError(f"{self.name}.num_classes is {count!r}; expected a whole number from 1")
        fetchers = self.fetchers
        if type(fetchers) is not int or not 0 <= fetchers <= MAX_THREADS:
            raise DataError(
                f"{self.name}.fetchers is {fetchers!r}; expected 0 to {MAX_THREADS}, the threads "
                "that ask for batches"
            )

    @property
    def layout(self) -> Layout:
        return Layout.of(self.batch(torch.tensor([0]))) if self._found is None else self._found

    @property
    def fetchers(self) -> int:
        fetchers: int = getattr(self.dataset, "fetchers", 0)
        return fetchers

    def _first_batch(self) -> Batch:
        first_1 = torch.tensor([0])
        if not self.fetchers:
            return self.batch(first_1)
        with generators_kept(), keyed(Stream.BATCH, Key(0, 0, 0)), noticed() as touched:
            batch = self.batch(first_1)
            if hasattr(self.dataset, "keyed_batch"):
                self.keyed_batch(first_1, 0, 0)
        if touched:
            raise DataError(
                f"{self.name}.fetchers is {self.fetchers}, so threads ask it beside the training, "
                f"but its batches draw from or seed {' and '.join(touched)}, which the training "
                "uses; take a generator made of firecaffe.data.current_key(), or leave fetchers out"
            )
        return batch

    def __len__(self) -> int:
        return self._length

    def batch(self, indices_B: Tensor) -> Batch:
        return self._checked(self.dataset.batch, indices_B, 0, EVALUATION)

    def keyed_batch(self, indices_B: Tensor, seed: int, epoch: int) -> Batch:
        fetch = partial(ask, self.dataset, seed=seed, epoch=epoch)
        return self._checked(fetch, indices_B, seed, epoch)

    def _made(self, fetch: Callable[[Tensor], Any], indices_B: Tensor, key: Key) -> Any:
        if self._is_torch_set:  # each of its items has a key
            return fetch(indices_B)
        if self.fetchers:
            with self.turns, under(key):
                return fetch(indices_B)
        with generators_kept(), keyed(Stream.BATCH, key):
            return fetch(indices_B)

    def _checked(
        self, fetch: Callable[[Tensor], Any], indices_B: Tensor, seed: int, epoch: int
    ) -> Batch:
        try:
            given = self._made(fetch, indices_B, Key(seed, epoch, int(indices_B[0])))
        except (FirecaffeError, *ENDS):
            raise
        except Exception as error:
            raise failed(f"{self.name}.batch()", error) from error
        if not (isinstance(given, tuple | list) and len(given) == 2):
            raise self._wrong(_name_of(given), f"the pair (inputs, targets){self._remedy}")
        batch = (given[0], () if given[1] is None else given[1])
        if is_images(self):
            self._check_images(*batch, count=len(indices_B))
        else:
            self._check_leaves(batch, indices_B)
        # A copy, since the memory may belong to the data set: a network or loss that modifies its
        # input would change it on one rank only, and the next batch may reuse it.
        return batch if self._is_uniform else map_batch(torch.clone, batch)

    def _check_images(self, images: Any, labels: Any, count: int) -> None:
        for what, tensor in (("images", images), ("labels", labels)):
            self._check_tensor(what, tensor)
        expected = (len(images) if images.ndim else 0, *self.sample_CHW)
        if images.dtype not in DTYPES or tuple(images.shape) != expected:
            raise self._wrong(
                f"images of {images.dtype}, {tuple(images.shape)}",
                f"uint8 or float32 of {(count, *self.sample_CHW)}",
            )
        if labels.ndim != 1 or labels.is_floating_point():
            raise self._wrong(
                f"targets of {labels.dtype}, {tuple(labels.shape)}",
                f"a class for each image, int64 of {(count,)}, as sample_CHW and num_classes "
                "together say it; other targets have another task.name (segmentation, regression, "
                "multilabel, or your own) and a data set without sample_CHW",
            )
        if labels.dtype != torch.int64:
            raise self._wrong(
                f"labels of {labels.dtype}, {tuple(labels.shape)}", f"int64 of {(count,)}"
            )
        wrong = labels[(labels < 0) | (labels >= self.num_classes)]
        if len(wrong):
            raise self._wrong(f"the label {int(wrong[0])}", f"0 to {self.num_classes - 1}")

    def _check_leaves(self, batch: Batch, indices_B: Tensor) -> None:
        count = len(indices_B)
        if not tree_leaves(batch[0]):
            raise self._wrong("no inputs", "some")
        for what, leaf in named_leaves(batch):
            self._check_tensor(what, leaf)
            if leaf.ndim == 0 or len(leaf) != count:
                raise self._wrong(f"{what} of {tuple(leaf.shape)}", f"a row for each of {count}")
        if self._found is not None and Layout.of(batch) != self._found:
            self._check_like_first(batch, self._found, int(indices_B[0]))

    def _check_like_first(self, batch: Batch, first: Layout, sample: int) -> None:
        expected, spec = tree_flatten((first.inputs, first.targets))
        if tree_flatten(batch)[1] != spec:
            raise self._wrong(f"{Layout.of(batch)} for sample {sample}", f"as sample 0: {first}")
        # Shapes may differ from those of sample 0 only if user code builds the batches.
        for (what, leaf), wanted in zip(named_leaves(batch), expected, strict=True):
            leaf_layout = leaf_of(leaf)
            if leaf.dtype != wanted.dtype or (self._is_uniform and leaf_layout != wanted):
                raise self._wrong(
                    f"{what} of {leaf_layout} for sample {sample}", f"{wanted}, as sample 0 has"
                )

    def _check_tensor(self, what: str, leaf: Any) -> None:
        if not isinstance(leaf, Tensor):
            raise self._wrong(f"{_name_of(leaf)} as {what}", "tensors")
        if kind := unusual(leaf):
            raise self._wrong(f"{what} that are {kind}", "dense tensors")
        if leaf.device.type != "cpu":
            raise self._wrong(f"{what} on {leaf.device}", "them on the CPU")
        if leaf.grad_fn is not None:
            raise self._wrong(f"{what} with the graph that made them", "them detached")

    @property
    def _remedy(self) -> str:
        return ", or firecaffe.from_torch(dataset, collate=…)" if self._is_torch_set else ""

    @property
    def _is_torch_set(self) -> bool:
        return isinstance(self.dataset, TorchSet)

    @property
    def _is_uniform(self) -> bool:
        """Whether torch's default collate makes each batch, in new memory."""
        return isinstance(self.dataset, TorchSet) and self.dataset.is_uniform

    def _wrong(self, given: str, expected: str) -> DataError:
        what = "'s items give" if self._is_torch_set else ".batch() gave"
        return DataError(f"{self.name}{what} {given}; expected {expected}")
