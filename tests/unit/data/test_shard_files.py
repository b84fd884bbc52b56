"""Where shards are read from: far away, from a cache that processes share, by many threads."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from firecaffe.data.packed import PackedPart, read_list
from firecaffe.data.shard_files import CachedFiles, open_files
from firecaffe.errors import DataError
from tests.typed import Typed
from tests.unit.data.test_packed import make_folder, pack, part_of


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
    remote = PackedPart(read_list(root), "train", open_files(root))
    here = part_of(packed)
    assert [remote.read(i) for i in range(30)] == [here.read(i) for i in range(30)]
    memory.rm("/bucket/train-00000.shard")
    with pytest.raises(DataError, match="memory://bucket: FileNotFoundError"):
        PackedPart(read_list(root), "train", open_files(root))
    with pytest.raises(DataError, match="nosuch://x"):
        read_list("nosuch://x")


def test_a_cache_fetches_each_shard_once_and_keeps_to_its_limit(
    packed: Path, tmp_path: Path
) -> None:
    infos = read_list(str(packed)).parts["train"]
    limit = sum(info.num_bytes for info in infos[:2]) + 100
    files = open_files(str(packed), str(tmp_path / "cache"), limit)
    assert isinstance(files, CachedFiles)
    part = PackedPart(read_list(str(packed)), "train", files)
    here = part_of(packed)
    for number in (*range(30), *range(30)):
        assert part.read(number) == here.read(number)
        held = sum(path.stat().st_size for path in (tmp_path / "cache").glob("*.shard"))
        assert held <= limit
    with pytest.raises(
        DataError, match=r"a shard of .* MB does not fit .*; raise data.cache_bytes"
    ):
        PackedPart(
            read_list(str(packed)), "train", open_files(str(packed), str(tmp_path / "tiny"), 100)
        ).read(0)


def test_processes_may_share_a_cache_at_its_limit(packed: Path, tmp_path: Path) -> None:
    """Room for one shard, and three processes that want all of them at once."""
    infos = read_list(str(packed)).parts["train"]
    limit = max(info.num_bytes for info in infos) + 10
    script = (
        "import sys\n"
        "from firecaffe.data.packed import PackedPart, read_list\n"
        "from firecaffe.data.shard_files import open_files\n"
        "root, cache, limit, seed = sys.argv[1:]\n"
        "files = open_files(root, cache, int(limit))\n"
        "part = PackedPart(read_list(root), 'train', files)\n"
        "for number in range(90): part.read(number * int(seed) % 30)\n"
    )
    cache = tmp_path / "cache"
    with ExitStack() as stack:
        started = [
            stack.enter_context(Typed("-c", script, packed, cache, limit, seed))
            for seed in (7, 11, 13)
        ]
        assert [(*process.communicate(), process.wait()) for process in started] == 3 * [
            ("", "", 0)
        ]
    assert sum(path.stat().st_size for path in cache.glob("*.shard")) <= limit
    assert not list(cache.glob("*.partial"))


def test_a_cache_does_not_keep_what_was_not_packed(packed: Path, tmp_path: Path) -> None:
    part = PackedPart(
        read_list(str(packed)), "train", open_files(str(packed), str(tmp_path / "cache"))
    )
    path = packed / "train-00000.shard"
    content = bytearray(path.read_bytes())
    content[60] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match="not what was packed"):
        part.read(0)
    assert not list((tmp_path / "cache").glob("*.shard"))
    assert not list((tmp_path / "cache").glob("*.partial"))


def test_many_threads_may_ask_for_the_first_sample_at_once(packed: Path) -> None:
    for _ in range(30):
        part = part_of(packed)
        with ThreadPoolExecutor(8) as pool:
            assert len(set(pool.map(part.read, [0] * 16))) == 1
