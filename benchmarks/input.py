"""Input: packed images against torch's DataLoader with Pillow over a folder, and the bare loop.

    python -m benchmarks.input PHOTOS > benchmarks/results/input.md

PHOTOS: a folder that holds JPEGs, at any depth, from which JPEGs of 500 x 375 are made. All ways
make the same batches: same samples, same boxes, same mirroring; before anything is timed they are
compared. The ways take turns; the control runs in the same process. Two threads here, two worker
processes there.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from math import log10
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from firecaffe.cluster.process_settings import keep_freed_memory
from firecaffe.data import Batches, DataConfig, SampleOrder, TensorDataset
from firecaffe.data.augment import box, cut, draws
from firecaffe.data.batches import PrefetchedBatches
from firecaffe.data.decode import DecodedSet, decode
from firecaffe.data.hash import Stream, below, hash64
from firecaffe.data.pack_images import Packing, PackOptions
from firecaffe.data.pack_sources import open_source
from firecaffe.data.packed import LIST, PackedPart, PackedSet, read_list
from firecaffe.data.shard import ShardWriter
from firecaffe.data.shard_files import open_files
from firecaffe.runs.environment import commit, cpu_name

ROWS, COLUMNS, QUALITY = 375, 500, 90
SIDE, SMALL, PAD = 224, 32, 4
THREADS = WORKERS = 2
BATCH, SMALL_BATCH = 64, 128
SMALL_IMAGES = 50_000
MILLION, MILLION_SHARDS = 1_000_000, 400
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
MIN_DB = 55.0
"""Between two ways' pixels: Pillow's scaling rounds otherwise."""
WAYS = "| images | way | images/s, median | min | max | / DataLoader | ratios | n |"

BYTES, BARE = "ours, packed, to uint8", "bare loop, to uint8"

Batch = tuple[Tensor, Tensor]
Way = Callable[[], Iterator[Batch]]


def make_photos(source: Path, dest: Path, count: int) -> None:
    """JPEGs of one size, in the folder layout."""
    paths = sorted(source.rglob("*.jp*g"))[:count]
    if not paths:
        sys.exit(f"{source}: holds no JPEGs")
    for number, path in enumerate(paths):
        folder = dest / "train" / path.parent.name
        folder.mkdir(parents=True, exist_ok=True)
        with Image.open(path) as image:
            photo = image.convert("RGB").resize((COLUMNS, ROWS))
        photo.save(folder / f"{number:06d}.jpg", quality=QUALITY)


class PillowFolder(TorchDataset[tuple[Tensor, int]]):
    """What everyone writes: a file is opened, decoded, cut and scaled by Pillow."""

    def __init__(self, files: list[str], labels: list[int], samples: list[int], seed: int) -> None:
        self.files, self.labels, self.samples = files, labels, samples
        numbers = torch.tensor(samples)
        self.draws = draws(seed, 0, numbers).tolist()
        self.mirrored = below(hash64(seed, Stream.MIRROR, 0, numbers), 2).tolist()

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        with Image.open(self.files[self.samples[place]]) as image:
            photo = image.convert("RGB")
        top, left, rows, columns = box(self.draws[place], photo.height, photo.width)
        edges = (left, top, left + columns, top + rows)
        photo = photo.crop(edges).resize((SIDE, SIDE), Image.Resampling.BILINEAR)
        if self.mirrored[place]:
            photo = photo.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.frombuffer(bytearray(photo.tobytes()), dtype=torch.uint8)
        image_CHW = pixels.view(SIDE, SIDE, 3).permute(2, 0, 1).contiguous()
        return image_CHW, self.labels[self.samples[place]]


class PillowSmall(TorchDataset[tuple[Tensor, int]]):
    """The same for small images in memory: padded, cut and mirrored by Pillow."""

    def __init__(self, images: Tensor, samples: list[int], seed: int) -> None:
        self.images, self.samples = images.permute(0, 2, 3, 1).contiguous().numpy(), samples
        numbers = torch.tensor(samples)
        most = 2 * PAD + 1
        self.top = below(hash64(seed, Stream.CROP_TOP, 0, numbers), most).tolist()
        self.left = below(hash64(seed, Stream.CROP_LEFT, 0, numbers), most).tolist()
        self.mirrored = below(hash64(seed, Stream.MIRROR, 0, numbers), 2).tolist()

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        sample = self.samples[place]
        padded = Image.new("RGB", (SMALL + 2 * PAD, SMALL + 2 * PAD))
        padded.paste(Image.fromarray(self.images[sample]), (PAD, PAD))
        left, top = self.left[place], self.top[place]
        image = padded.crop((left, top, left + SMALL, top + SMALL))
        if self.mirrored[place]:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        return pixels.view(SMALL, SMALL, 3).permute(2, 0, 1).contiguous(), sample % 10


def loader(dataset: TorchDataset[Any], batch: int, finish: Callable[..., Batch]) -> Iterator[Batch]:
    for images, labels in DataLoader(dataset, batch, num_workers=WORKERS):
        yield finish(images, labels)


def ours(batches: Batches) -> Iterator[Batch]:
    """As a training takes them, one micro-batch a step."""
    steps = batches.order.steps_per_epoch
    ahead = PrefetchedBatches(batches, range(1), 0, steps)
    for step in range(steps):
        yield ahead.train_batch(step, 0)
    ahead.close()


def bare(part: PackedPart, order: Tensor) -> Iterator[Batch]:
    """Threads that decode, cut and scale what lies in memory, and nothing else."""
    samples = order.tolist()
    contents = [part.read(sample) for sample in samples]
    drawn = draws(0, 0, order).tolist()
    _ready()

    def one(place: int) -> Tensor:
        image = decode(contents[place])
        return cut(image, box(drawn[place], *image.shape[1:]), SIDE)

    with ThreadPoolExecutor(THREADS) as pool:
        for image in pool.map(one, range(len(samples))):
            yield image, image


_started_s = 0.0


def _ready() -> None:
    """Starts the clock: what comes before is not timed."""
    global _started_s
    _started_s = time.perf_counter()


def images_per_s(way: Way, images: int) -> float:
    _ready()
    for _ in way():
        pass
    return images / (time.perf_counter() - _started_s)


def decibels(first: Tensor, second: Tensor) -> float:
    """Of the noise between two batches of pixels, full scale being 1."""
    error = (first - second).double().square().mean().item()
    return 10 * log10(1 / error) if error else float("inf")


def compare(ways: dict[str, Way], std: float) -> float:
    """The least likeness of the ways' first batches to the first way's, in dB; labels alike."""
    first, *others = [list(islice(way(), 3)) for way in ways.values()]
    worst = float("inf")
    for other in others:
        for (images, labels), (their_images, their_labels) in zip(first, other, strict=True):
            assert torch.equal(labels, their_labels), "other samples"
            worst = min(worst, decibels(images * std, their_images * std))
    return worst


def photo_ways(folder: Path, scratch: Path) -> tuple[dict[str, Way], dict[str, Way], int]:
    source = open_source(folder)
    Packing(source, scratch / "packed", PackOptions(), THREADS).run()
    root = str(scratch / "packed")
    part = PackedPart(read_list(root), "train", open_files(root))
    dataset = DecodedSet(part, 256, THREADS)
    config = DataConfig(
        "packed", augment="inception", crop=SIDE, resize=256, mirror=True, mean=MEAN, std=STD
    )
    order = SampleOrder(0, len(part), BATCH, BATCH)
    batches = Batches(dataset, order, config)
    in_order = torch.cat([order.micro_batch(step, 0) for step in range(order.steps_per_epoch)])
    # The packed set's own order of files, so that a sample's number means the same in both.
    packed_as = hash64(0, Stream.PACK, torch.arange(len(part))).argsort().tolist()
    files = [str(folder / source.parts["train"].names[number]) for number in packed_as]
    labels = [source.parts["train"].labels[number] for number in packed_as]
    pillow = PillowFolder(files, labels, in_order.tolist(), seed=0)
    ways: dict[str, Way] = {
        "ours, packed": lambda: ours(batches),
        "DataLoader + Pillow, folder": lambda: loader(pillow, BATCH, batches.on_device),
    }
    loops: dict[str, Way] = {
        BYTES: lambda: host_batches(batches),
        BARE: lambda: bare(part, in_order),
    }
    return ways, loops, len(part)


def host_batches(batches: Batches) -> Iterator[Batch]:
    """Ours up to the batch of bytes, as far as the bare loop goes."""
    ahead = PrefetchedBatches(batches, range(1), 0, batches.order.steps_per_epoch)
    return (batch for batch, _ in ahead._made)


def small_ways() -> tuple[dict[str, Way], int]:
    generator = torch.Generator().manual_seed(0)
    shape = (SMALL_IMAGES, 3, SMALL, SMALL)
    images = torch.randint(0, 256, shape, generator=generator).to(torch.uint8)
    dataset = TensorDataset(images, torch.arange(SMALL_IMAGES) % 10)
    config = DataConfig("own", crop=SMALL, pad=PAD, mirror=True, mean=MEAN, std=STD)
    order = SampleOrder(0, SMALL_IMAGES, SMALL_BATCH, SMALL_BATCH)
    batches = Batches(dataset, order, config)
    in_order = torch.cat([order.micro_batch(step, 0) for step in range(order.steps_per_epoch)])
    pillow = PillowSmall(images, in_order.tolist(), seed=0)
    return {
        "ours, in memory": lambda: ours(batches),
        "DataLoader + Pillow, array": lambda: loader(pillow, SMALL_BATCH, batches.on_device),
    }, SMALL_IMAGES


def million(scratch: Path) -> tuple[float, float]:
    """Milliseconds: to open a data set of a million samples, and to read all its indexes."""
    infos = []
    for number in range(MILLION_SHARDS):
        with ShardWriter(scratch / f"train-{number:05d}.shard", "jpeg") as writer:
            for _ in range(MILLION // MILLION_SHARDS):
                writer.add(b"x", 0)
            infos.append(writer.finish())
    packed = PackedSet("jpeg", (), ("0",), {"train": tuple(infos)}, "a million samples", ())
    (scratch / LIST).write_text(packed.to_json())
    opened, indexed = [], []
    for _ in range(9):
        start = time.perf_counter()
        part = PackedPart(read_list(str(scratch)), "train", open_files(str(scratch)))
        opened.append(time.perf_counter() - start)
        start = time.perf_counter()
        for shard in range(MILLION_SHARDS):
            part.label(shard * (MILLION // MILLION_SHARDS))
        indexed.append(time.perf_counter() - start)
    assert len(part) == MILLION
    return 1e3 * statistics.median(opened), 1e3 * statistics.median(indexed)


def timed(ways: dict[str, Way], images: int, repetitions: int) -> dict[str, list[float]]:
    """In turn, forth and back, after one round that is thrown away."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for repetition in range(repetitions + 1):
        for name in list(ways) if repetition % 2 else reversed(ways):
            rate = images_per_s(ways[name], images)
            if repetition:
                found[name].append(rate)
    return found


def report(title: str, rates: dict[str, list[float]], control: str) -> None:
    for name, own in rates.items():
        ratios = [mine / base for mine, base in zip(own, rates[control], strict=True)]
        print(
            f"| {title} | {name} | {statistics.median(own):,.0f} | {min(own):,.0f} | "
            f"{max(own):,.0f} | {statistics.median(ratios):.2f} | {min(ratios):.2f} to "
            f"{max(ratios):.2f} | {len(own)} |",
            flush=True,
        )


HEAD = """# Input

    python -m benchmarks.input PHOTOS

{cpu}, {cores} cores, torch {torch}, commit {commit}. JPEGs of {columns} x {rows} (quality
{quality}, {count} of them), a random box scaled to {side} x {side}, mirrored, normalized to
float32, in batches of {batch}; bytes of {small} x {small} x 3 ({small_count:,} of them, in memory),
padded by {pad}, cut at random, mirrored, normalized, in batches of {small_batch}. Ours with
{threads} threads, torch's DataLoader with {workers} worker processes; both hand bytes to the same
normalization. The ways take turns, forth and back; a ratio is that of the same repetition (ratios:
the least and the largest). Files are in the page cache. Before the timing the ways' batches were
compared: the same samples, the pixels of the JPEGs within {decibels:.0f} dB, those of the small
images equal. The bare loop decodes, cuts and scales what lies in memory, and makes no batches;
ours to uint8 goes as far as it does.
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("photos", type=Path)
    parser.add_argument("--count", type=int, default=1700)
    parser.add_argument("--repetitions", type=int, default=7)
    given = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as every training does; it serves both sides
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "photos"
        make_photos(given.photos, folder, given.count)
        photos, loops, count = photo_ways(folder, Path(scratch))
        small, small_count = small_ways()
        likeness = compare(photos, statistics.fmean(STD))
        assert likeness >= MIN_DB, f"the pixels differ: {likeness:.1f} dB"
        assert compare(small, 1.0) == float("inf"), "the small images differ"
        print(
            HEAD.format(
                cpu=cpu_name(),
                cores=os.cpu_count(),
                torch=torch.__version__,
                commit=commit()[:12],
                columns=COLUMNS,
                rows=ROWS,
                quality=QUALITY,
                count=count,
                side=SIDE,
                batch=BATCH,
                small=SMALL,
                small_count=small_count,
                pad=PAD,
                small_batch=SMALL_BATCH,
                threads=THREADS,
                workers=WORKERS,
                decibels=likeness,
            )
        )
        print(f"{WAYS}\n|{'---|' * 8}", flush=True)
        ways = photos | loops
        rates = timed(ways, count, given.repetitions)
        report("500 x 375 JPEG", rates, "DataLoader + Pillow, folder")
        to_bare = [a / b for a, b in zip(rates[BYTES], rates[BARE], strict=True)]
        rates = timed(small, small_count, given.repetitions)
        report("32 x 32 bytes", rates, "DataLoader + Pillow, array")
        print(
            f"\nOurs to uint8 over the bare loop: {statistics.median(to_bare):.2f} "
            f"({min(to_bare):.2f} to {max(to_bare):.2f})."
        )
        (Path(scratch) / "million").mkdir()
        opened_ms, indexed_ms = million(Path(scratch) / "million")
        print(
            f"\nA packed data set of {MILLION:,} samples in {MILLION_SHARDS} shards is opened in "
            f"{opened_ms:.1f} ms; all its indexes are read and checked in {indexed_ms:.0f} ms more "
            "(n = 9, medians)."
        )


if __name__ == "__main__":
    main()
