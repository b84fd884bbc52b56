"""Times the stages of the input, each by itself and all together.

Each stage has all threads, and its input is in memory. Storage is read cold (the system is asked to
drop the files from its cache) and warm, one sample at a time in random order, as in training.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TypeVar

import torch
from torch import Tensor

from firecaffe.data import DataConfig
from firecaffe.data.augment import box, cut, draws, normalize
from firecaffe.data.batches import Batches, PrefetchedBatches
from firecaffe.data.dataset import BrokenSampleError
from firecaffe.data.decode import SKIP, DecodedSet, Encoded, EncodedSubset, decode
from firecaffe.data.hash import Stream, hash64
from firecaffe.data.pack_images import Packing, PackOptions, Part, Source
from firecaffe.data.packed import PackedPart, read_list
from firecaffe.data.sample_order import SampleOrder
from firecaffe.data.shard_files import open_files
from firecaffe.errors import DataError
from firecaffe.files import private_folder
from firecaffe.transport.link import finish

A = TypeVar("A")

CPU = torch.device("cpu")
REPETITIONS = 3
DECODED_IMAGES = 200
"""The number of images in memory at a time, each of half a megabyte or more."""
BATCH = 32


@dataclass(frozen=True)
class InputStage:
    name: str
    images_per_s: float
    bytes_per_s: float = 0.0


@dataclass(frozen=True)
class StoredImages:
    """Images of a data set, in random order, as they are stored."""

    read: Callable[[int], bytes]
    samples: list[int]
    files: list[Path]
    """The files that hold the images; none if the address is remote."""


def sample(count: int, most: int) -> list[int]:
    return hash64(0, Stream.ORDER, torch.arange(count)).argsort()[:most].tolist()


def encoded_stages(
    source: Encoded, found: StoredImages, threads: int, config: DataConfig, device: torch.device
) -> list[InputStage]:
    """Time the stages of photos: storage, decode, crop and resize, batch, device, all together."""
    with ThreadPoolExecutor(threads) as pool:
        stages, contents = _storage(found, pool)
        contents = list(filter(_is_whole, contents))
        if not contents:
            raise DataError(f"{source.name(found.samples[0])}: not a whole image, nor is any other")
        images_per_s = _rate(pool, decode, contents)
        stages.append(InputStage("decode", images_per_s, images_per_s * _mean(contents)))
        images = list(pool.map(decode, contents[:DECODED_IMAGES]))
        numbers = torch.tensor(found.samples)
        drawn = draws(0, 0, numbers).tolist()

        def cut_one(place: int) -> Tensor:
            image = images[place % len(images)]
            return cut(image, box(drawn[place], *image.shape[1:]), config.crop)

        stages.append(InputStage("crop and resize", _rate(pool, cut_one, range(len(drawn)))))
        cuts = list(pool.map(cut_one, range(len(images))))
        stages += _batch_and_device(cuts, config, device)
    dataset = DecodedSet(
        EncodedSubset(source, torch.tensor(found.samples)), config.resize, threads, SKIP
    )
    stages.append(_together("together, warm", dataset, config, device))
    with _cold(found.files) as is_cold:
        if is_cold:
            stages.append(_together("together, cold", dataset, config, device, repetitions=1))
    dataset.close()
    return stages


def raw_stages(
    part: PackedPart, found: StoredImages, threads: int, config: DataConfig, device: torch.device
) -> list[InputStage]:
    with ThreadPoolExecutor(threads) as pool:
        stages, contents = _storage(found, pool)
    shape = part.shape
    pixels = [
        torch.frombuffer(bytearray(content), dtype=torch.uint8).view(shape) for content in contents
    ]
    return [*stages, *_batch_and_device(pixels, config, device)]


def formats(
    found: StoredImages, shape: tuple[int, ...], threads: int, beside: Path
) -> dict[str, float]:
    """Return images per second from cold storage, for the same images as files and as shards.

    Both are written anew, because caches below the system would favor what was written last. shape:
    of raw images, else empty.
    """
    rates = {}
    for name, write in (("a folder of files", _as_folder), ("packed", _as_shards)):
        parent = beside if os.access(beside, os.W_OK) else None
        with (
            private_folder("firecaffe-bench-", parent) as folder,
            ThreadPoolExecutor(threads) as pool,
        ):
            stages, _ = _storage(write(found, shape, folder), pool)
            rates[name] = stages[0].images_per_s
    return rates


def _as_folder(stored: StoredImages, shape: tuple[int, ...], folder: Path) -> StoredImages:
    for number, index in enumerate(stored.samples):
        (folder / f"{number:06d}").write_bytes(stored.read(index))
    os.sync()
    files = [folder / f"{number:06d}" for number in range(len(stored.samples))]
    return StoredImages(lambda number: files[number].read_bytes(), list(range(len(files))), files)


def _as_shards(stored: StoredImages, shape: tuple[int, ...], folder: Path) -> StoredImages:
    sizes = [len(stored.read(index)) for index in stored.samples]
    names = [str(index) for index in stored.samples]
    part = Part(names, [0] * len(names), sizes, lambda place: stored.read(stored.samples[place]))
    kind = "raw" if shape else "jpeg"
    source = Source(kind, shape, ["0"], {"train": part}, "samples")
    Packing(source, folder, PackOptions(), threads=1).run()
    os.sync()
    packed = PackedPart(read_list(str(folder)), "train", open_files(str(folder)))
    return StoredImages(
        packed.read, sample(len(packed), len(packed)), sorted(folder.glob("*.shard"))
    )


def _storage(
    stored: StoredImages, pool: ThreadPoolExecutor
) -> tuple[list[InputStage], list[bytes]]:
    stages = []
    with _cold(stored.files) as is_cold:
        start = time.perf_counter()
        contents = list(pool.map(stored.read, stored.samples))
        taken_s = time.perf_counter() - start
    mean = _mean(contents)
    if is_cold:
        rate = len(contents) / taken_s
        stages.append(InputStage("storage, cold", rate, rate * mean))
    rate = _rate(pool, stored.read, stored.samples)
    return [*stages, InputStage("storage, warm", rate, rate * mean)], contents


@contextmanager
def _cold(files: Sequence[Path]) -> Iterator[bool]:
    """Ask the system to drop these files from its cache; yield whether it could."""
    is_cold = bool(files) and hasattr(os, "posix_fadvise")
    for path in files if is_cold else ():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    yield is_cold


def _rate(pool: ThreadPoolExecutor, work: Callable[[A], object], given: Sequence[A]) -> float:
    return _median_rate(len(given), lambda: deque(pool.map(work, given), maxlen=0))


def _median_rate(count: int, work: Callable[[], object], device: torch.device = CPU) -> float:
    rates = []
    for _ in range(REPETITIONS):
        start = time.perf_counter()
        work()
        finish(device)
        rates.append(count / (time.perf_counter() - start))
    return median(rates)


def _is_whole(content: bytes) -> bool:
    try:
        decode(content)
    except BrokenSampleError:
        return False
    return True


def _mean(contents: Sequence[bytes]) -> float:
    return sum(map(len, contents)) / len(contents)


def _batch_and_device(
    images: Sequence[Tensor], config: DataConfig, device: torch.device
) -> list[InputStage]:
    parts = [images[at : at + BATCH] for at in range(0, len(images) - BATCH + 1, BATCH)] or [images]
    count = sum(map(len, parts))
    batch_rate = _median_rate(count, lambda: [torch.stack(tuple(part)) for part in parts])
    stacked = [torch.stack(tuple(part)) for part in parts]
    device_rate = _median_rate(
        count,
        lambda: [normalize(part, config.mean, config.std, device) for part in stacked],
        device,
    )
    return [InputStage("batch", batch_rate), InputStage("copy to device, normalize", device_rate)]


def _together(
    name: str,
    dataset: DecodedSet,
    config: DataConfig,
    device: torch.device,
    repetitions: int = REPETITIONS,
) -> InputStage:
    order = SampleOrder(0, len(dataset), BATCH, BATCH)
    rates = []
    for repetition in range(repetitions):
        first = repetition * order.steps_per_epoch
        steps = range(first, first + order.steps_per_epoch)
        batches = PrefetchedBatches(
            Batches(dataset, order, config, device), range(1), steps.start, steps.stop
        )
        start = time.perf_counter()
        for step in steps:
            batches.train_batch(step, 0)
        finish(device)
        rates.append(len(dataset) / (time.perf_counter() - start))
        batches.close()
    return InputStage(name, median(rates))
