"""The layout of a sample: trees of shapes and types, for its inputs and for its targets.

A tree is a tensor, or a dict, tuple, list or namedtuple of trees. The tensors of a batch have one
more dimension, the first: a row for each sample.
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
        inputs, targets = (tree_map(leaf_of, tree) for tree in batch)
        return cls(inputs, targets)

    def __str__(self) -> str:
        return f"{tree_words(self.inputs)} with targets {tree_words(self.targets)}"

    @property
    def channels(self) -> int | None:
        """The channels of an image, if the inputs are one; else None."""
        is_image = isinstance(self.inputs, Leaf) and len(self.inputs.shape) == 3
        return self.inputs.shape[0] if is_image else None

    @property
    def num_bytes(self) -> int:
        leaves = tree_leaves((self.inputs, self.targets))
        return sum(prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)

    def made_up(self, count: int, device: torch.device | str = "cpu") -> Batch:
        """Make a batch for timing: random floats; integers are 0, which is valid as a class."""
        return map_batch(
            lambda tensor: tensor.normal_() if tensor.is_floating_point() else tensor,
            self.zeros(count, device),
        )

    def zeros(self, count: int, device: torch.device | str = "cpu") -> Batch:
        inputs, targets = (
            tree_map(
                lambda leaf: torch.zeros(count, *leaf.shape, dtype=leaf.dtype, device=device), tree
            )
            for tree in (self.inputs, self.targets)
        )
        return inputs, targets


def leaf_of(tensor: Tensor) -> Leaf:
    return Leaf(tuple(tensor.shape[1:]), tensor.dtype)


def map_batch(function: Callable[[Tensor], Tensor], batch: Batch) -> Batch:
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


def tree_words(tree: Any) -> str:
    if isinstance(tree, Mapping):
        return f"{{{', '.join(f'{key}: {tree_words(branch)}' for key, branch in tree.items())}}}"
    if isinstance(tree, tuple | list):
        return f"({', '.join(map(tree_words, tree))})" if tree else "none"
    return str(tree)


def kind_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
