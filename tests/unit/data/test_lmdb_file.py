"""LMDBs are read as their own library reads them; damaged ones are one line and never a signal."""

import os
import random
from pathlib import Path

import lmdb
import pytest

from firecaffe.data.lmdb_file import FILE, LmdbFile
from firecaffe.errors import DataError

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
    with pytest.raises(DataError, match="databases of its own"):
        LmdbFile(tmp_path / "several")
    several = bytearray((write(tmp_path / "sorted", {b"a": b"1"}) / FILE).read_bytes())
    several[TREE_FLAGS] = several[PAGE + TREE_FLAGS] = 4  # in both meta pages
    (tmp_path / "sorted" / FILE).write_bytes(several)
    with pytest.raises(DataError, match="keys have several values"):
        LmdbFile(tmp_path / "sorted")
