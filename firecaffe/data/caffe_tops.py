"""The tensors that an open data layer gives for some samples: one for each of its tops."""

from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from firecaffe.data.caffe_records import Record, Records
from firecaffe.data.caffe_transform import Pixels, Transformer
from firecaffe.data.decoded import PARTS_OF_THREAD, decode_threads
from firecaffe.data.packed import HELD_BYTES
from firecaffe.errors import DataError

Draws = list[list[int]] | None
"""Random numbers of `caffe_transform.draws` for each sample. None: nothing is drawn."""


class Tops(Protocol):
    is_held: bool

    is_random: bool
    """Whether draws change the samples."""

    class_names: tuple[str, ...]

    def __len__(self) -> int: ...

    def fetch(self, samples: list[int], draws: Draws) -> list[Tensor]:
        """Return a row for each sample, at least one. Raises DataError, which names the damage."""

    def in_memory(self) -> "Tops":
        """Return a copy in memory if shapes are equal and at most 512 MB in all, else itself."""


class ImageTops:
    """Images, float32 of BCHW, and labels, int64 of B. Raises DataError if image 0 does not fit."""

    is_held = False

    def __init__(
        self, records: Records, transformer: Transformer, has_labels: bool, threads: int
    ) -> None:
        self.records, self.transformer, self.has_labels = records, transformer, has_labels
        self.is_random, self.class_names = transformer.is_random, records.class_names
        self.threads = decode_threads(threads) if records.is_decoded else 1
        self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix="decode")
        self.fetch([0], None)

    def __len__(self) -> int:
        return len(self.records)

    def fetch(self, samples: list[int], draws: Draws) -> list[Tensor]:
        first = self.records.read(samples[0])
        images_BCHW = torch.empty(len(samples), *self._shape(first, samples[0]))
        labels_B = torch.empty(len(samples), dtype=torch.int64)
        length = max(1, len(samples) // (PARTS_OF_THREAD * self.threads))

        def some(places: range) -> None:
            for place in places:
                record = self.records.read(samples[place]) if place else first
                self._check_shape(record, samples[place], samples[0], images_BCHW)
                labels_B[place] = record.label
                draw = None if draws is None else draws[place]
                self.transformer.write(images_BCHW[place].numpy(), record.image_CHW, draw)

        places = range(len(samples))
        parts = [places[at : at + length] for at in range(0, len(samples), length)]
        for _ in self._pool.map(some, parts) if self.threads > 1 else map(some, parts):
            pass
        return [images_BCHW, labels_B] if self.has_labels else [images_BCHW]

    def in_memory(self) -> Tops:
        records = self.records
        first_CHW = records.read(0).image_CHW
        if records.is_decoded or first_CHW.nbytes * len(records) > HELD_BYTES:
            return self
        images_NCHW: Pixels = np.empty((len(records), *first_CHW.shape), first_CHW.dtype)
        labels_N = torch.empty(len(records), dtype=torch.int64)
        for sample in range(len(records)):
            image_CHW, labels_N[sample] = records.read(sample)
            if image_CHW.shape != first_CHW.shape or image_CHW.dtype != first_CHW.dtype:
                return self
            images_NCHW[sample] = image_CHW
        return HeldTops(images_NCHW, labels_N, self.transformer, self.has_labels)

    def _shape(self, record: Record, sample: int) -> tuple[int, int, int]:
        try:
            return self.transformer.shape(record.image_CHW)
        except DataError as error:
            raise DataError(f"{self.records.name(sample)}: {error}") from None

    def _check_shape(self, record: Record, sample: int, first: int, images_BCHW: Tensor) -> None:
        shape, wanted = self._shape(record, sample), tuple(images_BCHW.shape[1:])
        if shape != wanted:
            raise DataError(
                f"{self.records.name(sample)}: is {shape}, and {self.records.name(first)} in the "
                f"same batch {wanted}; expected one shape: set crop_size, or new_height and "
                "new_width, or train on one sample at a time, train.micro_batch_size = 1"
            )


class HeldTops:
    is_held = True
    class_names: tuple[str, ...] = ()

    def __init__(
        self, images_NCHW: Pixels, labels_N: Tensor, transformer: Transformer, has_labels: bool
    ) -> None:
        self.images_NCHW, self.labels_N = images_NCHW, labels_N
        self.transformer, self.has_labels = transformer, has_labels
        self.is_random = transformer.is_random

    def __len__(self) -> int:
        return len(self.labels_N)

    def fetch(self, samples: list[int], draws: Draws) -> list[Tensor]:
        images_BCHW = self.images_NCHW[samples]
        to_BCHW = torch.empty(len(samples), *self.transformer.shape(images_BCHW[0]))
        if draws is None:
            self.transformer.write(to_BCHW.numpy(), images_BCHW, None)
        else:
            for to_CHW, image_CHW, draw in zip(to_BCHW.numpy(), images_BCHW, draws, strict=True):
                self.transformer.write(to_CHW, image_CHW, draw)
        return [to_BCHW, self.labels_N[samples]] if self.has_labels else [to_BCHW]

    def in_memory(self) -> Tops:
        return self
