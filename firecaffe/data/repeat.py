"""Whether a data set gives the same samples when it is asked again.

A run on another number of workers, or on another day, ends in the same bits only if it does.
"""

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from firecaffe.data.dataset import Dataset
from firecaffe.data.layout import Batch, Layout

NUM_ASKED_TWICE = 8
"""Samples that are asked for twice before the first step: of those that are mirrored by the toss of
a coin, all eight look alike once in 256.
"""


def is_repeatable(dataset: Dataset) -> bool:
    """Asks for samples from all over the data set, twice."""
    last = len(dataset) - 1
    samples = torch.unique(torch.linspace(0, last, NUM_ASKED_TWICE, dtype=torch.float64).long())
    return same_bits(dataset.batch(samples), dataset.batch(samples.clone()))


def is_asked_again(step: int) -> bool:
    """Whether a batch of this step, counted from 0, is asked for twice: those of steps 1, 2, 4, 8,
    … are, so that in a training of n steps it costs log2(n) batches.
    """
    return step & (step + 1) == 0


def same_bits(first: Batch, second: Batch) -> bool:
    return Layout.of(first) == Layout.of(second) and all(
        torch.equal(_bytes(a), _bytes(b))
        for a, b in zip(tree_leaves(first), tree_leaves(second), strict=True)
    )


def _bytes(tensor: Tensor) -> Tensor:
    """Bits: what is not a number does not equal itself."""
    return tensor.contiguous().flatten().view(torch.uint8)
