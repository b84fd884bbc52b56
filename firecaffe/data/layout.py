"""What a sample is: a tree of shapes and types, for its inputs and for its targets.

A tree is a tensor, or a dict, tuple, list or namedtuple of trees. In a batch each of its tensors
has one dimension more, the first: one row for each sample.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_leaves, tree_leaves_with_path, tree_map

Batch = tuple[Any, Any]
"""Inputs and targets of some samples, each a tree."""


@dataclass(frozen=True)
class Leaf:
    """One tensor of a sample, without its rows."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return " ".join(filter(None, [kind_of(self.dtype), "x".join(map(str, self.shape))]))


@dataclass(frozen=True)
class Layout:
    """A sample: trees of `Leaf`."""

    inputs: Any
    targets: Any

    def __hash__(self) -> int:  # dicts and lists have none; the order of a dict's keys is no matter
        return hash(frozenset(tree_leaves((self.inputs, self.targets))))

    @classmethod
    def of(cls, batch: Batch) -> "Layout":
        """That of a batch's samples."""
        inputs, targets = (tree_map(leaf_of, tree) for tree in batch)
        return cls(inputs, targets)

    def __str__(self) -> str:
        return f"{tree_words(self.inputs)} with targets {tree_words(self.targets)}"

    @property
    def channels(self) -> int | None:
        """Those of an image, if the inputs are one; else None."""
        is_image = isinstance(self.inputs, Leaf) and len(self.inputs.shape) == 3
        return self.inputs.shape[0] if is_image else None

    @property
    def num_bytes(self) -> int:
        """Memory of a sample."""
        leaves = tree_leaves((self.inputs, self.targets))
        return sum(prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)

    def made_up(self, count: int, device: torch.device | str = "cpu") -> Batch:
        """A batch to time things with: random numbers, and zeros where only some are known to be
        right, as of classes.
        """
        return map_batch(
            lambda each: each.normal_() if each.is_floating_point() else each,
            self.zeros(count, device),
        )

    def zeros(self, count: int, device: torch.device | str = "cpu") -> Batch:
        """A batch of so many samples; on the meta device it takes no memory."""
        inputs, targets = (
            tree_map(
                lambda leaf: torch.zeros(count, *leaf.shape, dtype=leaf.dtype, device=device), tree
            )
            for tree in (self.inputs, self.targets)
        )
        return inputs, targets


def leaf_of(tensor: Tensor) -> Leaf:
    """What a batch's tensor says of a sample."""
    return Leaf(tuple(tensor.shape[1:]), tensor.dtype)


def map_batch(function: Callable[[Tensor], Tensor], batch: Batch) -> Batch:
    """The batch with each of its tensors put through a function."""
    inputs, targets = batch
    if isinstance(inputs, Tensor) and isinstance(targets, Tensor):  # most are, and it costs less
        return function(inputs), function(targets)
    return tree_map(function, inputs), tree_map(function, targets)


def num_samples(inputs: Any, targets: Any) -> int:
    """Samples of a batch: the rows of the first tensor of its targets, or, if they have none, of
    its inputs.
    """
    for tree in (targets, inputs):
        if isinstance(tree, Tensor):
            return len(tree)
        if leaves := tree_leaves(tree):
            return len(leaves[0])
    raise ValueError("a batch without tensors")


def named_leaves(batch: Batch) -> list[tuple[str, Any]]:
    """The tensors of a batch, by name: `inputs['ids']`, `targets`."""
    return [
        (f"{what}{keystr(path)}", leaf)
        for what, tree in zip(("inputs", "targets"), batch, strict=True)
        for path, leaf in tree_leaves_with_path(tree)
    ]


def tree_words(tree: Any) -> str:
    """A tree of leaves in one line."""
    if isinstance(tree, Mapping):
        return f"{{{', '.join(f'{key}: {tree_words(each)}' for key, each in tree.items())}}}"
    if isinstance(tree, tuple | list):
        return f"({', '.join(map(tree_words, tree))})" if tree else "none"
    return str(tree)


def kind_of(dtype: torch.dtype) -> str:
    """A type as `float32`."""
    return str(dtype).removeprefix("torch.")
