"""A first look at a data set: whether images are as intended, and samples repeatable."""

from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from firecaffe.data.dataset import Batch, BrokenSampleError, Dataset, Layout
from firecaffe.data.decode import APPLY, DEEP_BITS, UPRIGHT, bits_of, decode, orientation
from firecaffe.errors import DataError

LOOKED_AT = 64
"""Most images of a part that are looked at."""


def evenly(count: int) -> Sequence[int]:
    """Return the numbers of at most LOOKED_AT samples, evenly spread over `count`."""
    return range(0, count, max(1, -(-count // LOOKED_AT)))


def look(
    part: str,
    samples: Sequence[int],
    head: Callable[[int], bytes],
    read: Callable[[int], bytes],
    exif: str,
) -> list[str]:
    """Look at some images of a part, and return lines to report; `exif` is a row of EXIF.

    `head` reads the start of a sample, enough for its metadata; `read` reads all of it. Raises
    DataError if all pixels of all images have one color: nothing can be learned.
    """
    heads: dict[int, bytes] = {}
    for sample in samples:
        with suppress(BrokenSampleError):  # training reports it when it reads the sample
            heads[sample] = head(sample)
    deep = [sample for sample, content in heads.items() if bits_of(content) == DEEP_BITS]
    _check_not_blank(part, list(heads), read, deep)
    notes = []
    if deep:
        notes.append(
            f"{part}: {len(deep)} of {len(heads)} images looked at have 16 bits a value; they "
            "are read as 8, of which 255 stands for 65,535"
        )
    turned = sum(orientation(content) != UPRIGHT for content in heads.values())
    if turned and exif != APPLY:
        notes.append(
            f"{part}: {turned} of {len(heads)} images looked at say (EXIF) that they are to be "
            f'turned, and are read as they are stored; data.exif = "{APPLY}" turns them'
        )
    return notes


def _check_not_blank(
    part: str, samples: Sequence[int], read: Callable[[int], bytes], deep: Sequence[int]
) -> None:
    color = None
    for sample in samples:
        try:
            image_CHW = decode(read(sample))
        except BrokenSampleError:
            continue
        first_C11 = image_CHW[:, :1, :1]
        if bool((image_CHW != first_C11).any()):
            return
        if color not in (None, first_C11.flatten().tolist()):
            return
        color = first_C11.flatten().tolist()
    if color is None or len(samples) == 1:
        return
    why = ""
    if deep:
        why = (
            "; they have 16 bits a value, which are read as 8, of which 255 stands for 65,535, so "
            "scale them to all of the 16 bits"
        )
    raise DataError(
        f"{part}: all {len(samples)} images looked at have one color, {color} of 255, at every "
        f"pixel; expected images that show something{why}"
    )


NUM_ASKED_TWICE = 8
"""Samples requested twice before the first step. Random mirroring is missed once in 256."""


def is_repeatable(dataset: Dataset) -> bool:
    """Whether samples are the same if requested again, without which runs differ in their bits."""
    last = len(dataset) - 1
    samples = torch.unique(torch.linspace(0, last, NUM_ASKED_TWICE, dtype=torch.float64).long())
    return same_bits(dataset.batch(samples), dataset.batch(samples.clone()))


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
