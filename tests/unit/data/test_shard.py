"""The shard format, and where shards are read from: far away, from a cache, by many threads."""

import json
import os
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firecaffe.data.packed import read_list
from firecaffe.data.shard import PROLOGUE, Read, ShardIndex, ShardWriter, read_index, read_sample
from firecaffe.data.shard_files import CachedFiles, open_files
from firecaffe.errors import DataError
from tests.kit.data_photos import flip, make_folder, pack, part_of
from tests.typed import Typed

SAMPLES = [b"first", b"", b"the third one", bytes(range(256))]
LABELS = [3, 0, 1, 2]


def write_shard(path: Path) -> bytes:
    with ShardWriter(path, "jpeg") as writer:
        for content, label in zip(SAMPLES, LABELS, strict=True):
            writer.add(content, label)
        writer.skipped.append("broken.jpg: not a whole image")
        writer.finish()
    return path.read_bytes()


def reader(content: bytes) -> Read:
    return lambda start, length: content[start : start + length]


def samples_of(content: bytes, index: ShardIndex) -> list[bytes]:
    return [read_sample(reader(content), index, place, "sample") for place in range(len(index))]


def test_the_layout_is_the_documented_one(tmp_path: Path) -> None:
    """Parsed here by docs/reference/shards.md alone."""
    content = write_shard(tmp_path / "a.shard")
    assert content[:8] == b"FIRECAFF"
    version = int.from_bytes(content[8:12], "little")
    header_bytes = int.from_bytes(content[12:16], "little")
    header_at = int.from_bytes(content[16:24], "little")
    assert (version, int.from_bytes(content[24:32], "little")) == (1, len(content))
    header = content[header_at : header_at + header_bytes]
    assert int.from_bytes(content[32:36], "little") == zlib.crc32(header)
    words = json.loads(header)
    at, count = words["index_at"], words["count"]
    offsets = np.frombuffer(content, "<u8", count + 1, at)
    labels = np.frombuffer(content, "<u4", count, at + 8 * (count + 1))
    checksums = np.frombuffer(content, "<u4", count, at + 8 * (count + 1) + -(-4 * count // 8) * 8)
    assert [content[a:b] for a, b in pairwise(offsets)] == SAMPLES
    assert labels.tolist() == LABELS
    assert checksums.tolist() == [zlib.crc32(each) for each in SAMPLES]
    assert offsets[0] == 40
    index = read_index(reader(content), "a", len(content))
    assert samples_of(content, index) == SAMPLES
    assert (index.labels.tolist(), len(index.skipped)) == (LABELS, 1)


@settings(max_examples=150)
@given(st.data())
def test_a_cut_or_changed_file_is_told_or_gives_the_same(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(write_shard(tmp_path_factory.mktemp("shard") / "a.shard"))
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] ^= data.draw(st.integers(1, 255))
    try:
        index = read_index(reader(bytes(content)), "a", len(content))
        found = samples_of(bytes(content), index)
    except DataError:
        pass
    else:
        # Nothing reads the last field of the prologue, and the padding before the index.
        assert (found, index.labels.tolist()) == (SAMPLES, LABELS)


@settings(max_examples=100)
@given(st.binary(max_size=200))
def test_no_bytes_at_all_give_a_traceback(content: bytes) -> None:
    with pytest.raises(DataError):
        read_index(reader(content), "a", len(content))


NO_HEADERS = [
    *({}, [], {"count": -1}, {"count": "x"}),
    *({"count": 1, "index_at": 10**18}, {"count": 10**12, "index_at": 40}),
]


@pytest.mark.parametrize("header", NO_HEADERS)
def test_a_header_with_a_right_checksum_and_wrong_words(header: object) -> None:
    text = json.dumps(header).encode()
    size = PROLOGUE.size + len(text)
    prologue = PROLOGUE.pack(b"FIRECAFF", 1, len(text), PROLOGUE.size, size, zlib.crc32(text), 0)
    with pytest.raises(DataError, match=r"^a: "):
        read_index(reader(prologue + text), "a", size)


def test_a_shard_that_was_not_finished_leaves_nothing(tmp_path: Path) -> None:
    with suppress(KeyboardInterrupt), ShardWriter(tmp_path / "a.shard", "jpeg") as writer:
        writer.add(b"x", 0)
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (0, b"X", "begins with b'XIRECAFF'; a shard begins with b'FIRECAFF'"),
        (8, b"\x02", "is of version 2; this firecaffe reads 1"),
    ],
)
def test_other_files_are_named_as_such(tmp_path: Path, place: int, value: bytes, said: str) -> None:
    content = bytearray(write_shard(tmp_path / "a.shard"))
    content[place : place + 1] = value
    with pytest.raises(DataError, match=said):
        read_index(reader(bytes(content)), "a", len(content))


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    pack(make_folder(tmp_path / "photos"), tmp_path / "packed")
    return tmp_path / "packed"


def test_a_remote_data_set_gives_the_same_samples(packed: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    for path in packed.iterdir():
        memory.pipe_file(f"/bucket/{path.name}", path.read_bytes())
    root = "memory://bucket"
    remote = part_of(root, open_files(root))
    here = part_of(packed)
    assert [remote.read(i) for i in range(30)] == [here.read(i) for i in range(30)]
    memory.rm("/bucket/train-00000.shard")
    with pytest.raises(DataError, match="memory://bucket: FileNotFoundError"):
        part_of(root, open_files(root))
    with pytest.raises(DataError, match="nosuch://x"):
        read_list("nosuch://x")


def test_a_server_that_sends_whole_files_needs_a_cache(packed: Path, tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    handler = partial(SimpleHTTPRequestHandler, directory=packed)
    with ThreadingHTTPServer(("localhost", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        root = f"http://localhost:{server.server_port}"
        with pytest.raises(DataError, match=r"ranges.*data\.cache"):
            part_of(root, open_files(root)).read(0)
        remote = part_of(root, open_files(root, str(tmp_path / "cache")))
        here = part_of(packed)
        assert [remote.read(i) for i in range(30)] == [here.read(i) for i in range(30)]
        server.shutdown()


def test_a_chain_of_addresses_is_not_followed(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    (tmp_path / "refs.json").write_text('{"dataset.json": "{}"}')
    with pytest.raises(DataError, match="chain of"):
        read_list(f"reference://::file://{tmp_path}/refs.json")


def test_a_cache_fetches_each_shard_once_and_keeps_to_its_limit(
    packed: Path, tmp_path: Path
) -> None:
    infos = read_list(str(packed)).parts["train"]
    limit = sum(info.num_bytes for info in infos[:2]) + 100
    files = open_files(str(packed), str(tmp_path / "cache"), limit)
    assert isinstance(files, CachedFiles)
    part = part_of(packed, files)
    here = part_of(packed)
    for number in (*range(30), *range(30)):
        assert part.read(number) == here.read(number)
        held = sum(path.stat().st_size for path in (tmp_path / "cache").glob("*.shard"))
        assert held <= limit
    tiny = open_files(str(packed), str(tmp_path / "tiny"), 100)
    with pytest.raises(DataError, match=r"a shard of .* MB does not fit .*; raise data.cache"):
        part_of(packed, tiny).read(0)


def test_a_cache_deletes_nothing_but_its_copies(packed: Path) -> None:
    """Its folder is the data set's: shards that were packed are not copies that may go."""
    (packed / "test-00001.shard.partial").touch()  # of a packing that is under way
    before = {path.name: path.read_bytes() for path in packed.iterdir()}
    limit = max(info.num_bytes for info in read_list(str(packed)).parts["train"])
    part = part_of(packed, open_files(str(packed), str(packed), limit))
    here = part_of(packed)
    assert [part.read(number) for number in range(30)] == [here.read(n) for n in range(30)]
    after = {path.name: path.read_bytes() for path in packed.iterdir()}
    assert before.items() <= after.items()


def test_no_room_on_a_nearly_full_disk_is_none(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(total=10**9, free=10**7))
    files = open_files(str(packed), str(tmp_path / "cache"))
    with pytest.raises(DataError, match="does not fit 0 MB"):
        part_of(packed, files).read(0)


def zeroed(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize("damage", [zeroed, lambda p: flip(p, 60), lambda p: os.truncate(p, 100)])
@pytest.mark.parametrize("is_open", [False, True])
def test_a_damaged_copy_is_fetched_again(
    packed: Path, tmp_path: Path, damage: Callable[[Path], None], is_open: bool
) -> None:
    """Its data set is whole: other images must not stand in for it, on this host alone."""
    files = open_files(str(packed), str(tmp_path / "cache"))
    part = part_of(packed, files)
    here = part_of(packed)
    samples = [part.read(number) for number in range(30)]
    for copy in (tmp_path / "cache").glob("*.shard"):
        damage(copy)
    if not is_open:
        part = part_of(packed, files)
    assert [part.read(number) for number in range(30)] == samples == [*map(here.read, range(30))]


READS_ALL = """
import sys
from firecaffe.data.packed import PackedPart, read_list
from firecaffe.data.shard_files import open_files
root, cache, limit, seed = sys.argv[1:]
part = PackedPart(read_list(root), "train", open_files(root, cache, int(limit)))
for number in range(90):
    part.read(number * int(seed) % 30)
"""


def test_processes_may_share_a_cache_at_its_limit(packed: Path, tmp_path: Path) -> None:
    """Room for one shard, and three processes that want all of them at once."""
    infos = read_list(str(packed)).parts["train"]
    limit, cache = max(info.num_bytes for info in infos) + 10, tmp_path / "cache"
    with ExitStack() as stack:
        processes = [
            stack.enter_context(Typed("-c", READS_ALL, packed, cache, limit, seed))
            for seed in (7, 11, 13)
        ]
        ends = [(*process.communicate(), process.wait()) for process in processes]
    assert ends == 3 * [("", "", 0)]
    assert sum(path.stat().st_size for path in cache.glob("*.shard")) <= limit
    assert not list(cache.glob("*.partial"))


def test_a_cache_does_not_keep_what_was_not_packed(packed: Path, tmp_path: Path) -> None:
    part = part_of(packed, open_files(str(packed), str(tmp_path / "cache")))
    flip(packed / "train-00000.shard", 60)
    with pytest.raises(DataError, match="not what was packed"):
        part.read(0)
    assert not list((tmp_path / "cache").glob("*.shard"))
    assert not list((tmp_path / "cache").glob("*.partial"))


def test_many_threads_may_ask_for_the_first_sample_at_once(packed: Path) -> None:
    for _ in range(30):
        part = part_of(packed)
        with ThreadPoolExecutor(8) as pool:
            assert len(set(pool.map(part.read, [0] * 16))) == 1
