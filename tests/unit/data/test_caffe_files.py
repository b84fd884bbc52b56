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


def net(folder: Path, words: str = "", tops: str = 'top: "data" top: "label"') -> DataConfig:
    (folder / "net.prototxt").write_text(
        f'layer {{ name: "d" type: "HDF5Data" {tops} {words}'
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
    train = open_data(net(tmp_path, tops='top: "data" top: "label" top: "more"')).train
    assert len(train) == 7
    samples_B = torch.tensor([5, 0, 2, 5, 3, 6, 1])
    inputs, targets = train.batch(samples_B)
    for top, name in zip((inputs, *targets), ("data", "label", "more"), strict=True):
        assert np.array_equal(top.numpy(), tops[name].astype(np.float32)[samples_B])
        assert top.dtype == torch.float32
    alone, labels_B = open_data(net(tmp_path)).train.batch(torch.tensor([4]))
    assert (labels_B.tolist(), alone.shape) == ([4.0], (1, 2, 3))


@pytest.mark.parametrize(
    ("tops", "expected"),
    [
        ({"data": np.zeros((2, 3))}, "b.h5: holds no numbers named label, as the top is called"),
        ({"data": np.zeros((2, 3)), "label": np.zeros(3)}, "b.h5: holds 2 data, 3 label"),
        ({"data": np.zeros((2, 4)), "label": np.zeros(2)}, "expected the same but for the rows"),
        ({"data": np.zeros((0, 3)), "label": np.zeros(0)}, "b.h5: holds no samples"),
        ({}, "b.h5: holds no numbers named data"),
    ],
)
def test_files_that_are_not_alike(
    tops: Mapping[str, NDArray[Any]], expected: str, tmp_path: Path
) -> None:
    write_hdf5(tmp_path / "a.h5", data=np.zeros((2, 3)), label=np.zeros(2))
    write_hdf5(tmp_path / "b.h5", **tops)
    (tmp_path / "list.txt").write_text("a.h5\nb.h5\n")
    with pytest.raises(FirecaffeError, match=expected):
        open_data(net(tmp_path))


def test_what_is_no_file_of_it(tmp_path: Path) -> None:
    two_files(tmp_path)
    (tmp_path / "b.h5").write_bytes(b"text")
    with pytest.raises(FirecaffeError, match=r"b\.h5: cannot be read as HDF5"):
        open_data(net(tmp_path))
    (tmp_path / "b.h5").unlink()
    with pytest.raises(FirecaffeError, match=r'list\.txt: file "b\.h5" is not there'):
        open_data(net(tmp_path))
    with pytest.raises(FirecaffeError, match="HDF5Data takes no transform_param"):
        open_data(net(tmp_path, "transform_param { scale: 2 }"))


def test_a_file_that_lies_of_its_size_or_place_is_one_line(tmp_path: Path) -> None:
    two_files(tmp_path)

    def told(data: Any) -> str:
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
    assert "h5: data would take 35,184,372,088,832 bytes; at most 16,777,216" in told(huge)
    chunk = {"shape": (4, 2, 3), "maxshape": (None, 2, None), "chunks": (1 << 12, 2, 1 << 12)}
    assert "data would take 134,217,728 bytes" in told(chunk)
    for link in (h5py.SoftLink("/label"), h5py.ExternalLink("a.h5", "/data")):
        assert "its data is a link" in told(link)
    apart = {"shape": (4, 2, 3), "external": [(str(tmp_path / "a.h5"), 0, h5py.h5f.UNLIMITED)]}
    assert "its data is in other files" in told(apart)


MUTATIONS = 300
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
    content = (small / FILE).read_bytes()
    told = []
    for length in range(0, len(content), 1024):
        (small / FILE).write_bytes(content[:length])
        try:
            read(small)
        except DataError as error:
            told.append(str(error))
    assert len(told) > 0.9 * len(content) / 1024
    assert all(line.startswith(f"{small}: not a whole LMDB, ") for line in told)
    assert not any("\n" in line for line in told)


def test_a_file_that_is_cut_while_it_is_read_is_one_line(small: Path) -> None:
    found = LmdbFile(small)
    os.truncate(small / FILE, 9000)
    with pytest.raises(DataError, match="it was cut since it was opened"):
        [found.value(number) for number in range(len(found))]


def test_changed_bytes_are_one_line_or_other_values(small: Path) -> None:
    content = (small / FILE).read_bytes()
    of_tree = [page for page in range(0, len(content), PAGE) if content[page + 10] in (1, 2, 8)]
    drawn = random.Random(0)
    told = []
    for _ in range(MUTATIONS):
        changed = bytearray(content)
        place = drawn.choice(of_tree) + drawn.randrange(64)
        changed[place : place + 2] = drawn.choice([b"\0\0", b"\xff\xff", b"\1\0", b"\0\x80"])
        (small / FILE).write_bytes(changed)
        try:
            read(small)
        except DataError as error:
            told.append(str(error))
    assert len(told) > MUTATIONS / 10
    assert not any("\n" in line for line in told)


@pytest.mark.parametrize("place", range(3))
def test_a_branch_without_nodes_is_one_line(tmp_path: Path, place: int) -> None:
    folder = write(tmp_path / "deep", values(1500, 500))
    content = bytearray((folder / FILE).read_bytes())
    branches = [page for page in range(0, len(content), PAGE) if content[page + 10] == 1]
    assert len(branches) > place
    content[branches[place] + 12 : branches[place] + 14] = (16).to_bytes(2, "little")
    (folder / FILE).write_bytes(content)
    with pytest.raises(DataError, match="none of its tree's"):
        read(folder)


def test_what_is_no_database_of_caffes(tmp_path: Path, small: Path) -> None:
    with pytest.raises(DataError, match="is no LMDB"):
        LmdbFile(tmp_path)
    os.mkfifo(tmp_path / FILE)
    with pytest.raises(DataError, match="is no LMDB"):
        LmdbFile(tmp_path)
    (small / FILE).write_bytes(b"no database" * 1000)
    with pytest.raises(DataError, match="begins with no page of LMDB's"):
        LmdbFile(small)
    with lmdb.open(str(tmp_path / "several"), max_dbs=2, map_size=1 << 20) as base:
        base.open_db(b"inner")
    with pytest.raises(DataError, match="named databases"):
        LmdbFile(tmp_path / "several")
    several = bytearray((write(tmp_path / "sorted", {b"a": b"1"}) / FILE).read_bytes())
    several[TREE_FLAGS] = several[PAGE + TREE_FLAGS] = 4  # in both meta pages
    (tmp_path / "sorted" / FILE).write_bytes(several)
    with pytest.raises(DataError, match="keys have several values"):
        LmdbFile(tmp_path / "sorted")
