"""Readers of binary files: packed data, Caffe's databases, tar files, and networks in .fcz."""

import contextlib
import io
import json
import tarfile
import zlib
from pathlib import Path

import h5py
import numpy as np
import torch
from PIL import Image

import firecaffe
from benchmarks.faults.fuzzed.reader import Reader
from firecaffe.compression import fcz
from firecaffe.compression.fcz.format import MAGIC, DamagedError, read_varint, varint
from firecaffe.data import DataConfig, open_data
from firecaffe.data.caffe_records import LmdbRecords
from firecaffe.data.caffe_tops import Hdf5Tops
from firecaffe.data.pack_images import Packing, PackOptions, verify
from firecaffe.data.pack_sources import open_source
from firecaffe.data.packed import LIST
from firecaffe.data.published_formats import ARCHIVE, TEST_FILES, TRAIN_FILES, open_cifar10
from firecaffe.data.shard import PROLOGUE
from firecaffe.errors import DataError
from tests.unit.compression.fcz.made import pruned, small, with_sums
from tools.caffe_goldens.data_cases import datum, pixels, png, raw, write_lmdb


def make_shards(folder: Path) -> None:
    for part in ("train", "test"):
        (folder / "source" / part / "a").mkdir(parents=True)
        for number in range(3):
            image = Image.new("RGB", (9, 7), (200, 30, 90 * number % 256))
            image.save(folder / "source" / part / "a" / f"{number}.jpg")
    source = open_source(folder / "source")
    Packing(source, folder / "jpeg", PackOptions(), 1).run()
    Packing(source, folder / "raw", PackOptions(raw=True), 1).run()
    for path in sorted((folder / "source").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


def read_shards(folder: Path) -> None:
    for name in ("jpeg", "raw"):
        data = open_data(DataConfig("packed", str(folder / name), resize=8, decode_threads=1))
        for part in data.parts.values():
            part.batch(torch.arange(min(len(part), 8)))
        with contextlib.suppress(DataError):  # what differs from the list is read too
            verify(str(folder / name))


def sums_anew(folder: Path) -> None:
    """Shards whose header and index have the sums of their bytes, of which the list knows."""
    for path in folder.rglob("*.shard"):
        content = b"" if path.is_symlink() or not path.is_file() else path.read_bytes()
        if len(content) > PROLOGUE.size:
            path.write_bytes(_summed(content))
            _say_in_list(path)


def _summed(content: bytes) -> bytes:
    magic, version, _, header_at, _, _, zero = PROLOGUE.unpack_from(content)
    header = content[header_at:]
    try:
        words = json.loads(header)
        words["index_crc32"] = zlib.crc32(content[words["index_at"] : header_at])
        header = json.dumps(words).encode()
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    whole = len(content[:header_at]) + len(header)
    sums = len(header), header_at, whole, zlib.crc32(header), zero
    return PROLOGUE.pack(magic, version, *sums) + content[PROLOGUE.size : header_at] + header


def _say_in_list(path: Path) -> None:
    where = path.with_name(LIST)
    words = json.loads(where.read_text())
    for info in (info for infos in words["parts"].values() for info in infos):
        if info["file"] == path.name:
            info["num_bytes"] = path.stat().st_size
    where.write_text(json.dumps(words))


def make_lmdb(folder: Path) -> None:
    image = datum(data=png(9, 7, 0), label=1, encoded=True)
    write_lmdb(folder / "raw", [raw(pixels((3, 9, 12), each), each) for each in range(60)])
    write_lmdb(folder / "apart", [raw(pixels((3, 40, 40), each), each) for each in range(3)])
    write_lmdb(folder / "encoded", [image] * 3)
    for path in folder.rglob("lock.mdb"):
        path.unlink()


def read_lmdb(folder: Path) -> None:
    for each in ("raw", "apart", "encoded"):
        records = LmdbRecords(folder / each, "native")
        for number in range(len(records)):
            records.name(number)
            records.read(number)
        open_source(folder / each)


def make_hdf5(folder: Path) -> None:
    data, label = np.arange(96, dtype="f4").reshape(8, 12), np.arange(8, dtype="f4")
    for name, libver in (("old", "earliest"), ("new", "latest")):
        with h5py.File(folder / f"{name}.h5", "w", libver=libver) as file:
            file["data"] = data
            file["label"] = label
            file.create_dataset("packed", data=data, chunks=(4, 6), compression="gzip")


def read_hdf5(folder: Path) -> None:
    tops = Hdf5Tops([folder / "old.h5", folder / "new.h5"], ["data", "label", "packed"])
    tops.in_memory().fetch([0, len(tops) - 1], None)
    tops.fetch([len(tops) - 1, 1], None)


def make_tars(folder: Path) -> None:
    _write_tar(folder / "train.tar", {f"{each}/x.jpg": _jpeg() for each in "ab"}, "")
    _write_tar(folder / "test.tar", {f"{each}/x.jpg": _jpeg() for each in "ab"}, "")


def read_tars(folder: Path) -> None:
    for part in open_source(folder).parts.values():
        for number in range(len(part)):
            part.read(number)


def make_archive(folder: Path) -> None:
    _write_tar(folder / ARCHIVE, {n: b"\3" + bytes(3072) for n in TRAIN_FILES + TEST_FILES}, "gz")


def _write_tar(path: Path, contents: dict[str, bytes], packed: str) -> None:
    with tarfile.open(path, f"w:{packed}") as archive:  # type: ignore[call-overload]
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def _jpeg() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (9, 7), (200, 30, 90)).save(file, "JPEG")
    return file.getvalue()


def make_networks(folder: Path) -> None:
    fcz.write(folder / "small.fcz", small(), {"model": {"name": "lenet"}})
    network = {"model": {"name": "lenet_300_100"}, "num_classes": 10, "in_channels": 1}
    shapes = {"ip1": (300, 784), "ip2": (100, 300), "ip3": (10, 100)}
    tensors = {f"{name}.weight": pruned(shape, 0.01, 4) for name, shape in shapes.items()}
    tensors |= {f"{name}.bias": np.ones(shape[0], "f4") for name, shape in shapes.items()}
    fcz.write(folder / "net.fcz", tensors, network)


def read_networks(folder: Path) -> None:
    with fcz.read(folder / "small.fcz") as file:
        for _ in file.tensors():
            pass
    firecaffe.load(folder / "net.fcz")


def fcz_sums_anew(folder: Path) -> None:
    """Networks that say how long they are, and have the sums of their bytes."""
    for path in folder.glob("*.fcz"):
        if path.is_file() and not path.is_symlink():
            with contextlib.suppress(DamagedError):
                path.write_bytes(with_sums(_with_length(path.read_bytes())))


def _with_length(data: bytes) -> bytes:
    place = len(MAGIC) + 1
    stored, place = read_varint(data, place)
    _, place = read_varint(data, place)
    _, rest = read_varint(data, place)
    body_bytes = max(0, len(data) - rest - 4 - stored)
    return data[:place] + varint(body_bytes) + data[rest:]


READERS = {
    "shards": Reader(make_shards, read_shards),
    "shards, new sums": Reader(make_shards, read_shards, sums_anew, damaged="*.shard"),
    "lmdb": Reader(make_lmdb, read_lmdb),
    "hdf5": Reader(make_hdf5, read_hdf5),
    "tar": Reader(make_tars, read_tars),
    "cifar10 archive": Reader(make_archive, lambda folder: open_cifar10(folder, 1)),
    "fcz": Reader(make_networks, read_networks),
    "fcz, new sums": Reader(make_networks, read_networks, fcz_sums_anew),
}
