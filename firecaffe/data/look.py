"""A first look at some encoded images of a data set: what is read of them otherwise than meant."""

from collections.abc import Callable, Sequence
from contextlib import suppress

from firecaffe.data.dataset import BrokenSampleError
from firecaffe.data.decode import DEEP_BITS, bits_of, decode
from firecaffe.data.exif import APPLY, UPRIGHT, orientation
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
