"""A first look at some encoded images of a data set: what is read of them otherwise than meant.

Whether a data set gives the same samples when it is asked again.

A run on another number of workers, or on another day, ends in the same bits only if it does.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from firecaffe.data.dataset import BrokenSampleError, Dataset
from firecaffe.data.decode import APPLY, DEEP_BITS, UPRIGHT, bits_of, decode, orientation
from firecaffe.data.layout import Batch, Layout
from firecaffe.errors import DataError

LOOKED_AT = 64
"""Images of a part, at most."""


def evenly(count: int) -> Sequence[int]:
    """The numbers of LOOKED_AT samples from all over `count`, or of all."""
    return range(0, count, max(1, -(-count // LOOKED_AT)))


def look(
    part: str,
    samples: Sequence[int],
    head: Callable[[int], bytes],
    read: Callable[[int], bytes],
    exif: str,
) -> list[str]:
    """What is to be said of a part's images, in lines.

    head: a sample's beginning, which is enough for what an image says of itself. read: all of it.
    exif: a row of `exif.EXIF`.

    Raises: DataError if all images that are looked at are of one color, the same: nothing can be
    learned of them.
    """
    heads: dict[int, bytes] = {}
    for sample in samples:
        with suppress(BrokenSampleError):  # whoever trains on it says what is wrong
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
    """Reads images until two pixels differ: mostly one."""
    color = None
    for sample in samples:
        try:
            image_CHW = decode(read(sample))
        except BrokenSampleError:
            continue
        first_C11 = image_CHW[:, :1, :1]
        if bool((image_CHW != first_C11).any()):
            return
        if color is None:
            color = first_C11.flatten().tolist()
        if color != first_C11.flatten().tolist():
            return
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
        f"pixel; expected some in which something is to be seen{why}"
    )


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
