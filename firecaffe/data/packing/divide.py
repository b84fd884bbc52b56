"""A test part for a source that has none: some images of each class.

They have the smallest `hash64(Stream.HOLD_OUT, number)`, so a folder always gives the same parts.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import torch

from firecaffe.data.hash import Stream, hash64
from firecaffe.data.image_folder import TESTS
from firecaffe.data.packing.part import Part, Source
from firecaffe.errors import DataError, RecipeError

HELD_OUT_SHARE = 0.1
"""The default share of each class that becomes the test part."""


def with_test_part(source: Source, share: float | None) -> tuple[Source, str]:
    """Split a test part off the training images if there is none, and return a line that says so.

    `share` is of each class, at least one image of two or more. None: a tenth; 0: no test part.
    Raises RecipeError if it is given with a test part, DataError if no class has two images.
    """
    tests = [name for name in TESTS if name in source.parts]
    if tests:
        if share is not None:
            raise RecipeError(
                f"--hold-out is {share:g}, and {source.about} has a part {tests[0]} already; "
                "leave it out"
            )
        return source, ""
    if share == 0:
        return source, f"{source.about} has no test part, which a training needs"
    whole = source.parts["train"]
    held = _held_out(whole.labels, HELD_OUT_SHARE if share is None else share)
    if not held:
        raise DataError(
            f"{source.about}: has no test part, and no class has two images to hold one out of"
        )
    rest = sorted(set(range(len(whole))) - held)
    parts = {"train": _some(whole, rest), "test": _some(whole, sorted(held))}
    line = (
        f"{source.about} has no test part: {len(held):,} of its {len(whole):,} images are held "
        "out as one, of every class alike (--hold-out SHARE; 0 for none)"
    )
    return replace(source, parts=parts), line


def _held_out(labels: Sequence[int], share: float) -> set[int]:
    by_class: dict[int, list[int]] = defaultdict(list)
    for number, label in enumerate(labels):
        by_class[label].append(number)
    hashes = hash64(int(Stream.HOLD_OUT), torch.arange(len(labels))).tolist()
    held: set[int] = set()
    for numbers in by_class.values():
        count = min(len(numbers) - 1, max(1, round(share * len(numbers))))
        held |= set(sorted(numbers, key=hashes.__getitem__)[:count])
    return held


def _some(part: Part, numbers: Sequence[int]) -> Part:
    return Part(
        [part.names[number] for number in numbers],
        [part.labels[number] for number in numbers],
        [part.sizes[number] for number in numbers],
        lambda number: part.read(numbers[number]),
    )
