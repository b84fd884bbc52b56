"""Encoded images as a data set, decoded by threads on request.

The thread that decodes an image also scales and crops it, while it is in its core's cache.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from firecaffe.data.dataset import BrokenSampleError
from firecaffe.data.decode import IGNORE, decoded, scale
from firecaffe.errors import DataError

STOP, SKIP = "stop", "skip"
ON_ERROR = (STOP, SKIP)

TO_SKIP = 'data.on_error = "skip" lets the next whole image stand in for it'

MOST_STAND_INS = 100
"""Damaged images in a row after which the data set counts as damaged."""

PARTS_OF_THREAD = 2
"""Parts of a batch for each thread, so that threads that finish early do more."""

Transform = Callable[[Tensor, int], Tensor]
"""A function (image, uint8 of 3 x H x W; its place in the batch) -> its row of the batch."""


class Encoded(Protocol):
    """Labeled encoded images, by number. `read` raises DataError."""

    num_classes: int
    class_names: tuple[str, ...]

    @property
    def shard_counts(self) -> tuple[int, ...]:
        """Samples of each shard, in order. Empty if there are no shards."""

    def __len__(self) -> int: ...

    def read(self, sample: int) -> bytes: ...

    def name(self, sample: int) -> str: ...

    def labels(self, samples_B: Tensor) -> Tensor: ...


def cores() -> int:
    """Return the number of cores that this process may use, fewer if it is bound to some."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def decode_threads(asked: int) -> int:
    """Return `asked`, or if it is 0, this rank's share of the host's cores."""
    if asked:
        return asked
    count = cores()
    is_bound = count < (os.cpu_count() or count)  # a bound rank's cores are its share already
    return count if is_bound else max(1, count // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


class DecodedSet:
    """Encoded images resized to resize x resize. Batches raise DataError for a damaged image."""

    def __init__(
        self,
        source: Encoded,
        resize: int,
        threads: int = 0,
        on_error: str = STOP,
        exif: str = IGNORE,
    ) -> None:
        self.source = source
        self.on_error, self.exif = on_error, exif
        self.num_classes = source.num_classes
        self.class_names = source.class_names
        self.sample_CHW = (3, resize, resize)
        self.shard_counts = source.shard_counts
        self.threads = decode_threads(threads)
        self.skipped: dict[int, str] = {}
        """Damaged images that another one replaced, and the error of each."""
        self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix="decode")

    def __len__(self) -> int:
        return len(self.source)

    def batch(self, indices_B: Tensor) -> tuple[Tensor, Tensor]:
        _, rows, columns = self.sample_CHW
        return self.transformed(indices_B, lambda image, _: scale(image, rows, columns))

    def transformed(
        self, indices_B: Tensor, transform: Transform, side: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Make a batch of images by `transform`, of side x side; 0: of `sample_CHW`."""
        shape = (3, side, side) if side else self.sample_CHW
        # Channels last, as images are decoded. Normalization changes the layout on the device.
        images_BCHW = torch.empty(
            len(indices_B), *shape, dtype=torch.uint8, memory_format=torch.channels_last
        )
        samples = indices_B.tolist()
        work = partial(self._some, transform, images_BCHW, samples)
        # Handing over images one by one would cost a twentieth of the time to decode them.
        length = max(1, len(samples) // (PARTS_OF_THREAD * self.threads))
        parts = [range(len(samples))[at : at + length] for at in range(0, len(samples), length)]
        used = [number for part in self._pool.map(work, parts) for number in part]
        return images_BCHW, self.source.labels(torch.tensor(used, dtype=torch.int64))

    def _some(
        self, transform: Transform, images_BCHW: Tensor, samples: list[int], places: range
    ) -> list[int]:
        return [self._one(transform, images_BCHW, place, samples[place]) for place in places]

    def _one(self, transform: Transform, images_BCHW: Tensor, place: int, sample: int) -> int:
        for number in range(sample, sample + MOST_STAND_INS):
            number %= len(self)
            try:
                images_BCHW[place] = transform(self._decoded(number), place)
                return number
            except BrokenSampleError as error:
                if self.on_error == STOP:
                    raise BrokenSampleError(f"{error}; {TO_SKIP}") from error.__cause__
                self.skipped[number] = str(error)
        raise DataError(
            f"{self.skipped[sample]}; and so are the {MOST_STAND_INS - 1} after it: the data set "
            "is broken, not an image"
        )

    def _decoded(self, sample: int) -> Tensor:
        content = self.source.read(sample)
        try:
            return decoded(content, self.exif)
        except BrokenSampleError as error:
            raise BrokenSampleError(f"{self.source.name(sample)}: {error}") from error.__cause__

    def close(self) -> None:
        """End the threads, and drop work that has not begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)
