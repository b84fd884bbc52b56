"""HDF5 files and LMDBs, beside their own libraries; damaged ones are one line, no signal."""

import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import lmdb
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from firecaffe.data import DataConfig, open_data
from firecaffe.data.lmdb_file import FILE, LmdbFile
from firecaffe.errors import DataError, FirecaffeError


def write_hdf5(path: Path, **tops: NDArray[Any]) -> None:
    with h5py.File(path, "w") as file:
        for name, values in tops.items():
            file[name] = values


def net(folder: Path, tops: str = 'top: "data" top: "label"') -> DataConfig:
    (folder / "net.prototxt").write_text(
        f'layer {{ name: "d" type: "HDF5Data" {tops}'
        ' hdf5_data_param { source: "list.txt" batch_size: 4 } }'
    )
    return DataConfig(name=f"caffe:{folder}/net.prototxt")


def two_files(folder: Path) -> dict[str, NDArray[Any]]:
    """Three and four samples; what the two files hold together."""
    random = np.random.default_rng(1)
    tops: dict[str, NDArray[Any]] = {
        "data": random.standard_normal((7, 2, 3)),
        "label": np.arange(7),
        "more": random.standard_normal((7, 1)).astype(np.float32),
    }
    write_hdf5(folder / "a.h5", **{name: each[:3] for name, each in tops.items()})
    write_hdf5(folder / "b.h5", **{name: each[3:] for name, each in tops.items()})
    (folder / "list.txt").write_text("a.h5\nb.h5\n")
    return tops


@pytest.mark.parametrize("held_bytes", [0, 1 << 20])
def test_tops_are_float32_in_the_order_of_the_list(
    held_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("firecaffe.data.caffe_tops.HELD_BYTES", held_bytes)
    tops = two_files(tmp_path)
    train = open_data(net(tmp_path, 'top: "data" top: "label" top: "more"')).train
    assert len(train) == 7
    samples_B = torch.tensor([5, 0, 2, 5, 3, 6, 1])
    inputs, targets = train.batch(samples_B)
    for top, name in zip((inputs, *targets), ("data", "label", "more"), strict=True):
        assert np.array_equal(top.numpy(), tops[name].astype(np.float32)[samples_B])
        assert top.dtype == torch.float32
    alone, labels_B = open_data(net(tmp_path)).train.batch(torch.tensor([4]))
    assert (labels_B.tolist(), alone.shape) == ([4.0], (1, 2, 3))


@pytest.mark.parametrize(
    ("tops", "part"),
    [
        ({"data": np.zeros((2, 3))}, "b.h5: holds no numbers named label, as the top is called"),
        ({"data": np.zeros((2, 3)), "label": np.zeros(3)}, "b.h5: holds 2 data, 3 label"),
        ({"data": np.zeros((2, 4)), "label": np.zeros(2)}, "expected the same but for the rows"),
        ({"data": np.zeros((0, 3)), "label": np.zeros(0)}, "b.h5: holds no samples"),
        ({}, "b.h5: holds no numbers named data"),
        (None, "b.h5: cannot be read as HDF5"),
    ],
)
def test_files_that_do_not_fit(
    tops: Mapping[str, NDArray[Any]] | None, part: str, tmp_path: Path
) -> None:
    write_hdf5(tmp_path / "a.h5", data=np.zeros((2, 3)), label=np.zeros(2))
    (tmp_path / "list.txt").write_text("a.h5\nb.h5\n")
    with pytest.raises(FirecaffeError, match=r'list\.txt: file "b\.h5" is not there'):
        open_data(net(tmp_path))
    if tops is None:
        (tmp_path / "b.h5").write_bytes(b"text")
    else:
        write_hdf5(tmp_path / "b.h5", **tops)
    with pytest.raises(FirecaffeError, match=part):
        open_data(net(tmp_path))


def test_a_file_that_lies_of_its_size_or_place_is_one_line(tmp_path: Path) -> None:
    two_files(tmp_path)

    def line_of(data: Any) -> str:
        name = f"{len(list(tmp_path.iterdir()))}.h5"  # others may still be open
        (tmp_path / "list.txt").write_text(f"a.h5\n{name}\n")
        with h5py.File(tmp_path / name, "w") as file:
            file["label"] = np.zeros(4)
            if isinstance(data, dict):
                file.create_dataset("data", dtype="f4", **data)
            else:
                file["data"] = data
        with pytest.raises(FirecaffeError) as raised:
            open_data(net(tmp_path))
        return str(raised.value)

    huge = {"shape": (4, 2, 1 << 40), "chunks": (1, 1, 1024), "compression": "gzip"}
    assert "data would take 35,184,372,088,832 bytes; at most 16,777,216" in line_of(huge)
    chunk = {"shape": (4, 2, 3), "maxshape": (None, 2, None), "chunks": (1 << 12, 2, 1 << 12)}
    assert "data would take 134,217,728 bytes" in line_of(chunk)
    for link in (h5py.SoftLink("/label"), h5py.ExternalLink("a.h5", "/data")):
        assert "its data is a link" in line_of(link)
    apart = {"shape": (4, 2, 3), "external": [(str(tmp_path / "a.h5"), 0, h5py.h5f.UNLIMITED)]}
    assert "its data is in other files" in line_of(apart)


PAGE = 4096
TREE_FLAGS = 92
"""Where a meta page has them."""


def write(folder: Path, values: dict[bytes, bytes]) -> Path:
    folder.mkdir(exist_ok=True)
    with lmdb.open(str(folder), map_size=1 << 26) as base, base.begin(write=True) as view:
        for key, value in values.items():
            view.put(key, value)
    return folder


def read(folder: Path) -> list[tuple[bytes, bytes]]:
    found = LmdbFile(folder)
    return [(found.key(number), found.value(number)) for number in range(len(found))]


def by_library(folder: Path) -> list[tuple[bytes, bytes]]:
    with lmdb.open(str(folder), readonly=True, lock=False) as base, base.begin() as view:
        return list(view.cursor())


def values(count: int, key_bytes: int = 8) -> dict[bytes, bytes]:
    """Values beside their keys, and in pages of their own; an odd key shifts what follows."""
    drawn = random.Random(0)
    return {
        (b"%08d" % number).ljust(key_bytes, b"x"): drawn.randbytes(drawn.choice([0, 30, 31, 5000]))
        for number in range(count)
    }


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write(tmp_path / "small", values(90))


@pytest.mark.parametrize(("count", "key_bytes"), [(0, 8), (1, 8), (90, 8), (90, 9), (1500, 500)])
def test_what_the_library_reads(tmp_path: Path, count: int, key_bytes: int) -> None:
    folder = write(tmp_path / "set", values(count, key_bytes))
    assert read(folder) == by_library(folder)
    assert len(LmdbFile(folder)) == count


def test_what_a_database_is_after_changes(small: Path) -> None:
    for change in range(3):
        with lmdb.open(str(small), map_size=1 << 26) as base, base.begin(write=True) as view:
            for number in range(change, 90, 4):
                view.delete(b"%08d" % number)
        write(small, {b"%08d" % (change * 7): bytes(3000)})
        assert read(small) == by_library(small)


def test_a_truncated_file_is_one_line(small: Path) -> None:
    whole = LmdbFile(small)
    content = (small / FILE).read_bytes()
    lines = []
    for length in range(0, len(content), 1024):
        (small / FILE).write_bytes(content[:length])
        try:
            read(small)
        except DataError as error:
            lines.append(str(error))
    assert len(lines) > 0.9 * len(content) / 1024
    assert all(line.startswith(f"{small}: not a whole LMDB, ") for line in lines)
    os.truncate(small / FILE, 9000)
    with pytest.raises(DataError, match="it was cut since it was opened"):
        [whole.value(number) for number in range(len(whole))]


@pytest.mark.parametrize(
    ("kind", "place", "value", "part"),
    [
        (1, 12, b"\x10\0", "none of its tree's"),  # a branch without nodes
        (2, 16, b"\xff\xff", "a page has a node outside of itself"),
    ],
)
def test_a_changed_page_is_one_line(
    tmp_path: Path, kind: int, place: int, value: bytes, part: str
) -> None:
    folder = write(tmp_path / "deep", values(1500, 500))
    content = (folder / FILE).read_bytes()
    pages = [page for page in range(0, len(content), PAGE) if content[page + 10] == kind]
    assert len(pages) > 2
    for start in (page + place for page in pages[:3]):
        (folder / FILE).write_bytes(content[:start] + value + content[start + 2 :])
        with pytest.raises(DataError, match=part):
            read(folder)


def test_what_is_no_database_of_caffes(tmp_path: Path, small: Path) -> None:
    def refused(folder: Path, part: str) -> None:
        with pytest.raises(DataError, match=part):
            LmdbFile(folder)

    refused(tmp_path, "is no LMDB")
    os.mkfifo(tmp_path / FILE)
    refused(tmp_path, "is no LMDB")
    (small / FILE).write_bytes(b"no database" * 1000)
    refused(small, "begins with no page of LMDB's")
    with lmdb.open(str(tmp_path / "several"), max_dbs=2, map_size=1 << 20) as base:
        base.open_db(b"inner")
    refused(tmp_path / "several", "named databases")
    several = bytearray((write(tmp_path / "sorted", {b"a": b"1"}) / FILE).read_bytes())
    several[TREE_FLAGS] = several[PAGE + TREE_FLAGS] = 4  # in both meta pages
    (tmp_path / "sorted" / FILE).write_bytes(several)
    refused(tmp_path / "sorted", "keys have several values")
