"""Data sets, and the layout of a sample: trees of shapes and types of inputs and targets.

A tree is a tensor, or a dict, tuple, list or namedtuple of trees. The tensors of a batch have one
more dimension, the first: a row for each sample.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol, TypeGuard

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_leaves, tree_leaves_with_path, tree_map

from firecaffe.errors import DataError
from firecaffe.user_code import failed

Batch = tuple[Any, Any]
"""Inputs and targets of some samples, each a tree."""


@dataclass(frozen=True)
class TensorLayout:
    """One tensor of a sample, without the batch dimension."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return " ".join(filter(None, [kind_of(self.dtype), "x".join(map(str, self.shape))]))


@dataclass(frozen=True)
class Layout:
    inputs: Any
    targets: Any

    def __hash__(self) -> int:  # dicts and lists have no hash, and the order of keys is irrelevant
        return hash(frozenset(tree_leaves((self.inputs, self.targets))))

    @classmethod
    def of(cls, batch: Batch) -> "Layout":
        return cls(*map_batch(leaf_of, batch))

    def __str__(self) -> str:
        return f"{tree_text(self.inputs)} with targets {tree_text(self.targets)}"

    @property
    def channels(self) -> int | None:
        """The number of channels if the inputs are an image, else None."""
        is_image = isinstance(self.inputs, TensorLayout) and len(self.inputs.shape) == 3
        return self.inputs.shape[0] if is_image else None

    @property
    def num_bytes(self) -> int:
        leaves = tree_leaves((self.inputs, self.targets))
        return sum(prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)

    def dummy_batch(self, count: int, device: torch.device | str = "cpu") -> Batch:
        """Make a batch for timing: random floats; integers are 0, which is valid as a class."""
        return map_batch(
            lambda tensor: tensor.normal_() if tensor.is_floating_point() else tensor,
            self.zeros(count, device),
        )

    def zeros(self, count: int, device: torch.device | str = "cpu") -> Batch:
        return map_batch(
            lambda leaf: torch.zeros(count, *leaf.shape, dtype=leaf.dtype, device=device),
            (self.inputs, self.targets),
        )


def leaf_of(tensor: Tensor) -> TensorLayout:
    return TensorLayout(tuple(tensor.shape[1:]), tensor.dtype)


def unusual(tensor: Tensor) -> str:
    """Return the kind of a tensor whose bytes are not simply its elements, else an empty string."""
    if tensor.is_nested or tensor.is_quantized:
        return "nested" if tensor.is_nested else "quantized"
    return "" if tensor.layout == torch.strided else str(tensor.layout)


def map_batch(function: Callable[[Any], Any], batch: Batch) -> Batch:
    inputs, targets = batch
    if isinstance(inputs, Tensor) and isinstance(targets, Tensor):  # the common case, made fast
        return function(inputs), function(targets)
    return tree_map(function, inputs), tree_map(function, targets)


def num_samples(inputs: Any, targets: Any) -> int:
    """Return the rows of the first tensor of the targets, or of the inputs if targets have none."""
    for tree in (targets, inputs):
        if isinstance(tree, Tensor):
            return len(tree)
        if leaves := tree_leaves(tree):
            return len(leaves[0])
    raise ValueError("a batch without tensors")


def named_leaves(batch: Batch) -> list[tuple[str, Any]]:
    """Return the tensors of a batch with their names: `inputs['ids']`, `targets`."""
    return [
        (f"{what}{keystr(path)}", leaf)
        for what, tree in zip(("inputs", "targets"), batch, strict=True)
        for path, leaf in tree_leaves_with_path(tree)
    ]


def shape_text(shape: Sequence[int]) -> str:
    """Return a shape as "3 x 28 x 28"."""
    return " x ".join(map(str, shape)) or "one number"


def tree_text(tree: Any) -> str:
    if isinstance(tree, Mapping):
        return f"{{{', '.join(f'{key}: {tree_text(branch)}' for key, branch in tree.items())}}}"
    if isinstance(tree, tuple | list):
        return f"({', '.join(map(tree_text, tree))})" if tree else "none"
    return str(tree)


def kind_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class BrokenSampleError(DataError):
    """A sample that exists but is damaged. `data.on_error = "skip"` skips this error alone."""


@contextmanager
def reading(path: object) -> Iterator[None]:
    """Convert an OSError to a DataError that says that `path` cannot be read."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot be read, {error.strerror or error}") from error


class Dataset(Protocol):
    """Samples that can be read by number.

    Optional members: `num_classes` and `class_names`; for `data.balance`, `targets` (the class of
    each sample) and `sample_weights`; and `keyed_batch(indices_B, seed, epoch)`, which training
    calls instead of `batch`. Its random draws must be a function of (seed, epoch, sample).
    """

    def __len__(self) -> int: ...

    def batch(self, indices_B: Tensor) -> Batch:
        """Return inputs and targets of samples (int64) on the CPU, as trees with a row per sample.

        Leaves of the trees (dict, tuple, list, namedtuple) are tensors of any type. Any samples may
        be requested at any time, one or more at once. The result depends on `indices_B` alone.
        """


class Images(Dataset, Protocol):
    """Images of classes, of one shape: uint8 or float32 of BCHW, with labels from 0, int64 of B.

    The image settings of a recipe apply to each data set with `sample_CHW` and `num_classes`.
    """

    sample_CHW: tuple[int, int, int]
    """Channels, rows and columns of each image."""

    num_classes: int
    """The number of classes; labels are 0 to num_classes - 1."""


def is_images(dataset: Dataset) -> TypeGuard[Images]:
    return hasattr(dataset, "sample_CHW") and hasattr(dataset, "num_classes")


def num_classes(dataset: Dataset) -> int | None:
    count: int | None = getattr(dataset, "num_classes", None)
    return count


SET_FACTS = ("sample_CHW", "num_classes", "class_names", "transform_words")
SAMPLE_FACTS = ("targets", "sample_weights")
"""Optional members that describe a data set, and those that describe each sample."""


def fact_of(dataset: Any, name: str) -> Any:
    """Return an optional member, or None. Raises OwnCodeError if a property raises."""
    try:
        return getattr(dataset, name, None)
    except Exception as error:
        raise failed(f"{name} of {type(dataset).__name__}", error) from error


def copy_facts(to: Any, dataset: Dataset, names: Sequence[str]) -> None:
    for name in names:
        fact = fact_of(dataset, name)
        if fact is not None:
            setattr(to, name, fact)


def ask(dataset: Dataset, indices_B: Tensor, seed: int, epoch: int) -> Batch:
    """Read a batch as training does: by `keyed_batch` if there is one."""
    keyed = getattr(dataset, "keyed_batch", None)
    batch: Batch = dataset.batch(indices_B) if keyed is None else keyed(indices_B, seed, epoch)
    return batch


def numbers_of(name: str, values: Any, count: int) -> Tensor:
    """Return the numbers, one for each of `count` samples. Raises DataError for anything else."""
    try:
        numbers_N = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{name} are no numbers ({error}); expected one for each sample") from error
    if numbers_N.shape != (count,):
        raise DataError(
            f"{name} have shape {tuple(numbers_N.shape)}; expected one for each of {count} samples"
        )
    return numbers_N


def layout_of(dataset: Dataset) -> Layout:
    layout: Layout | None = getattr(dataset, "layout", None)
    if layout is not None:
        return layout
    return Layout.of(dataset.batch(torch.tensor([0])))


class TensorDataset:
    """A data set in memory. A batch takes one indexing operation per tensor.

    If inputs are uint8 (0 to 255) or float32 of (N, C, H, W), and targets are integers of (N,), the
    samples are images of classes.

    Args:
        inputs: A tensor, or a tree of tensors (dict, tuple, list), with a row for each sample.
        targets: A tensor or a tree of tensors, with as many rows.
        num_classes: The number of classes. For images the default is the largest label plus one.
        class_names: A name for each class, by label.
        sample_weights: A number for each sample, for `data.balance = "own"`.

    Raises DataError if there are no samples, rows differ in number, or a label is out of range.
    """

    sample_CHW: tuple[int, int, int]
    """Channels, rows and columns of each image, if the samples are images."""
    num_classes: int
    """The number of classes, if the samples are images or the caller gave it."""

    def __init__(
        self,
        inputs: Any,
        targets: Any,
        num_classes: int | None = None,
        *,
        class_names: Sequence[str] | None = (),
        sample_weights: Any = None,
    ) -> None:
        leaves = named_leaves((inputs, targets))
        for name, leaf in leaves:
            if not isinstance(leaf, Tensor):
                remedy = "; torch.from_numpy makes one" * isinstance(leaf, np.ndarray)
                raise DataError(f"{name} is a {type(leaf).__name__}, expected tensors{remedy}")
            if leaf.ndim == 0 or leaf.numel() == 0:
                raise DataError(f"{name} has shape {tuple(leaf.shape)}, expected at least one row")
            if leaf.requires_grad or unusual(leaf) or leaf.device.type != "cpu":
                kind = f"is {unusual(leaf) or leaf.layout}"
                kind = "requires a gradient" if leaf.requires_grad else kind
                raise DataError(
                    f"{name} {kind} on {leaf.device}, expected dense tensors on the CPU without "
                    f"gradients, as {name}.detach()"
                )
        counts = {len(leaf): name for name, leaf in leaves}
        if len(counts) != 1:
            described = " and ".join(f"{count} {name}" for count, name in counts.items())
            raise DataError(f"there are {described or 'no tensors'}, expected as many of each")
        if num_classes is not None and (type(num_classes) is not int or num_classes < 1):
            raise DataError(f"num_classes is {num_classes!r}; expected a whole number from 1")
        self.inputs, self.targets = inputs, targets
        self.class_names = () if class_names is None else tuple(class_names)
        self.sample_weights = sample_weights
        self._length = len(leaves[0][1])
        if _are_images(inputs, targets):
            self._hold_images(num_classes)
        elif num_classes is not None:
            self.num_classes = num_classes

    def _hold_images(self, num_classes: int | None) -> None:
        _, channels, rows, columns = self.inputs.shape
        self.sample_CHW = (channels, rows, columns)
        self.targets = labels_N = self.targets.to(torch.int64)
        self.num_classes = int(labels_N.max()) + 1 if num_classes is None else num_classes
        wrong = ((labels_N < 0) | (labels_N >= self.num_classes)).nonzero()
        if len(wrong) > 0:
            first = int(wrong[0])
            raise DataError(
                f"label {int(labels_N[first])} of sample {first} is out of range, "
                f"expected 0 to {self.num_classes - 1}"
            )

    @property
    def layout(self) -> Layout:
        """The shapes and types of one sample."""
        return Layout.of((self.inputs, self.targets))

    def __len__(self) -> int:
        return self._length

    def subset(self, samples_N: Tensor) -> "TensorDataset":
        """Return a copy of the samples of `samples_N`, an int64 tensor of (N,)."""
        weights = self.sample_weights
        if weights is not None:
            weights = numbers_of("sample_weights", weights, len(self))[samples_N]
        return TensorDataset(
            *self.batch(samples_N),
            num_classes(self),
            class_names=self.class_names,
            sample_weights=weights,
        )

    def batch(self, indices_B: Tensor) -> Batch:
        """Return the samples of `indices_B`, an int64 tensor of (B,)."""
        # 15 times as fast as an index in brackets, for 128 images of 3 kB.
        return map_batch(lambda leaf: leaf.index_select(0, indices_B), (self.inputs, self.targets))


def _are_images(inputs: Any, targets: Any) -> bool:
    return (
        isinstance(inputs, Tensor)
        and isinstance(targets, Tensor)
        and inputs.ndim == 4
        and inputs.dtype in (torch.uint8, torch.float32)
        and targets.ndim == 1
        and not targets.is_floating_point()
        and targets.dtype != torch.bool
    )


ENDS = (IndexError, EOFError, StopIteration)
"""Errors that a data set raises if it holds fewer samples than its length says."""

NUM_ASKED_TWICE = 8
"""Samples requested twice before the first step. Random mirroring escapes once in 256."""


def is_repeatable(dataset: Dataset) -> bool:
    """Whether samples asked for again have the same bits. Raises DataError if one is missing."""
    last = len(dataset) - 1
    samples = torch.unique(torch.linspace(0, last, NUM_ASKED_TWICE, dtype=torch.float64).long())
    try:
        return same_bits(dataset.batch(samples), dataset.batch(samples.clone()))
    except ENDS as error:
        raise DataError(
            f"the data end before sample {last} of {len(dataset)} ({type(error).__name__}: {error})"
        ) from error


def is_asked_again(step: int) -> bool:
    """Whether a batch of this step (from 0) is requested twice: step 1, 2, 4, 8, … of the run."""
    return step & (step + 1) == 0


def same_bits(first: Batch, second: Batch) -> bool:
    return Layout.of(first) == Layout.of(second) and all(
        torch.equal(_bytes(a), _bytes(b))
        for a, b in zip(tree_leaves(first), tree_leaves(second), strict=True)
    )


# Bytes are compared because NaN does not equal itself.
def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)
