"""Encoded images as a data set: decoded by threads, when they are asked for.

What is done to an image (scaled, cut) is done by the thread that has decoded it, while it is in
that core's cache; an image of another size than the network's never waits in memory.
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
"""What a broken image does: it ends the run, or the next whole one stands in for it."""

TO_SKIP = 'data.on_error = "skip" lets the next whole image stand in for it'
"""What a broken image that ends the run is told with."""

MOST_STAND_INS = 100
"""Broken images in a row: then the data set is broken, not an image."""

PARTS_OF_THREAD = 2
"""Parts of a batch for each thread: threads that finish early take another's."""

Transform = Callable[[Tensor, int], Tensor]
"""(image, uint8 of 3 x H x W; its place in the batch) -> what the batch holds of it."""


class Encoded(Protocol):
    """Labeled encoded images, any of them by number."""

    num_classes: int
    class_names: tuple[str, ...]

    @property
    def shard_counts(self) -> tuple[int, ...]:
        """Samples that lie together, in order; empty if each lies alone."""

    def __len__(self) -> int: ...

    def read(self, sample: int) -> bytes:
        """Raises: DataError."""

    def name(self, sample: int) -> str:
        """The sample's name for people."""

    def labels(self, samples_B: Tensor) -> Tensor: ...


def cores() -> int:
    """The number of cores that this process may use: ranks that are bound to cores keep to them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def decode_threads(asked: int) -> int:
    """Threads of one rank: what was asked for, or its share of its host's cores."""
    if asked:
        return asked
    own = cores()
    is_bound = own < (os.cpu_count() or own)  # a rank that is bound has its share already
    return own if is_bound else max(1, own // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


class DecodedSet:
    """A data set of encoded images, each warped to resize x resize.

    threads: 0 for this rank's share of the cores. on_error: a row of ON_ERROR. exif: a row of EXIF.
    """

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
        """Broken images that another stood in for, and what was wrong."""
        self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix="decode")

    def __len__(self) -> int:
        return len(self.source)

    def batch(self, indices_B: Tensor) -> tuple[Tensor, Tensor]:
        """Raises: DataError if an image is missing or broken; it names it."""
        _, rows, columns = self.sample_CHW
        return self.transformed(indices_B, lambda image, _: scale(image, rows, columns))

    def transformed(
        self, indices_B: Tensor, transform: Transform, side: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Like `batch`, with images made by `transform`, of side x side; 0: of `sample_CHW`."""
        shape = (3, side, side) if side else self.sample_CHW
        # Channels last, as images are decoded: whoever normalizes them turns them, on the device.
        images_BCHW = torch.empty(
            len(indices_B), *shape, dtype=torch.uint8, memory_format=torch.channels_last
        )
        samples = indices_B.tolist()
        work = partial(self._some, transform, images_BCHW, samples)
        # Handing over one image at a time would cost a twentieth of what decoding it takes.
        length = max(1, len(samples) // (PARTS_OF_THREAD * self.threads))
        parts = [range(len(samples))[at : at + length] for at in range(0, len(samples), length)]
        used = [number for part in self._pool.map(work, parts) for number in part]
        return images_BCHW, self.source.labels(torch.tensor(used, dtype=torch.int64))

    def _some(
        self, transform: Transform, images_BCHW: Tensor, samples: list[int], places: range
    ) -> list[int]:
        return [self._one(transform, images_BCHW, place, samples[place]) for place in places]

    def _one(self, transform: Transform, images_BCHW: Tensor, place: int, sample: int) -> int:
        """Returns the sample that was used: the one asked for, or its stand-in."""
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
        """Ends the threads; what they have not begun is dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)
