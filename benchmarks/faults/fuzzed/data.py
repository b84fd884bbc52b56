"""Readers of data sets."""

import gzip
from pathlib import Path

import torch
from PIL import Image

from benchmarks.faults.fuzzed.reader import Reader
from firecaffe.data import DataConfig
from firecaffe.data.published_formats import open_cifar10, read_idx_pair
from firecaffe.data.sources import open_image_folder


def make_idx(folder: Path) -> None:
    header = b"\0\0\x08\x03" + b"".join(n.to_bytes(4, "big") for n in (5, 4, 3))
    (folder / "images").write_bytes(gzip.compress(header + bytes(range(60)), mtime=0))
    (folder / "labels").write_bytes(b"\0\0\x08\x01\0\0\0\x05" + bytes([0, 1, 2, 3, 4]))


def make_images(folder: Path) -> None:
    for part in ("train", "test"):
        (folder / part / "a").mkdir(parents=True)
        for suffix in ("jpg", "png", "bmp", "webp"):
            Image.new("RGB", (9, 7), (200, 30, 90)).save(folder / part / "a" / f"x.{suffix}")


def read_images(folder: Path) -> None:
    train, *_ = open_image_folder(DataConfig("folder", str(folder), resize=8))
    train.batch(torch.arange(len(train)))


def make_cifar(folder: Path) -> None:
    for name in (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"):
        (folder / name).write_bytes((b"\x03" + bytes(3072)) * 2)


READERS = {
    "idx": Reader(make_idx, lambda f: read_idx_pair(f / "images", f / "labels", 10)),
    "images": Reader(make_images, read_images),
    "cifar10": Reader(make_cifar, lambda folder: open_cifar10(folder, 2)),
}
