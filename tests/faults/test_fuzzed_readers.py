"""Whatever is read from elsewhere is read or refused: never a crash, a hang or all memory.

Each reader gets files of its own kind with bytes changed, cut, repeated or inserted. What comes of
it is a value or one of our errors, within so much memory that no claim of a header could be paid.
"""

import gzip
import json
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from firecaffe.cli.parse import read_recipe
from firecaffe.data.cifar10 import open_cifar10
from firecaffe.data.config import DataConfig
from firecaffe.data.idx import read_idx_pair
from firecaffe.data.source import open_image_folder
from firecaffe.errors import FirecaffeError
from firecaffe.recipe.identity import to_toml
from firecaffe.recipe.sections import Recipe
from firecaffe.runs.compare import read_run
from firecaffe.runs.explain import explain
from firecaffe.training import checkpoint as checkpoints
from firecaffe.training.checkpoint import Checkpoint, load_newest, save_checkpoint
from firecaffe.training.stored import InMemory

MEMORY_BYTES = 1_000_000_000
"""More than the process has when a reader begins."""
SECONDS = 20


@dataclass(frozen=True)
class Reader:
    """How a file, or a folder of them, is made and read."""

    make: Callable[[Path], object]
    read: Callable[[Path], object]
    after: Callable[[Path], object] = lambda _: None
    """Done to the folder after the damage."""


def make_checkpoint(folder: Path) -> None:
    tensors = {"parameter/w": torch.arange(12.0), "buffer/n": torch.tensor(3)}
    numbers = {"scalars": {"w/x": 1}, "scaler": {}}
    save_checkpoint(folder, Checkpoint(3, {"a": 1}, "p", "h", InMemory(tensors), numbers))


def read_checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    return dict(load_newest(folder)[0].tensors)


def digest_anew(folder: Path) -> None:
    """As a stranger would, so that the damage gets behind the digests."""
    for each in folder.glob("step-*"):
        names = (checkpoints.STATE, checkpoints.META)
        sums = "".join(f"{checkpoints._sha256(each / name)}  {name}\n" for name in names)
        (each / checkpoints.SUMS).write_text(sums)


def make_idx(folder: Path) -> None:
    header = b"\0\0\x08\x03" + b"".join(n.to_bytes(4, "big") for n in (5, 4, 3))
    (folder / "images").write_bytes(gzip.compress(header + bytes(range(60))))
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


def make_run(folder: Path) -> None:
    result = {"world_size": 1, "exchange": "tree", "route": "tree", "data": "x", "steps": 3}
    result |= {"images_per_s": 1.5, "exposed_communication": 0.1, "top1": 0.5}
    (folder / "result.json").write_text(json.dumps(result | {"weights_sha256": "ab"}))
    (folder / "environment.json").write_text(json.dumps({"host": "a", "cores": 2}))
    (folder / "recipe.toml").write_text(to_toml(Recipe()))


def make_timings(folder: Path) -> None:
    (folder / "timings").mkdir()
    parts = dict.fromkeys(("data_s", "compute_s", "exposed_communication_s", "update_s"), 0.1)
    for rank in range(2):
        rows = [json.dumps({"step": step, **parts, "step_s": 0.5}) for step in range(1, 12)]
        (folder / f"timings/rank-{rank}.jsonl").write_text("\n".join(rows) + "\n")


def make_recipe(folder: Path) -> None:
    (folder / "recipe.toml").write_text(to_toml(Recipe()))


READERS = {
    "checkpoint": Reader(make_checkpoint, read_checkpoint),
    "checkpoint with digests of its own": Reader(make_checkpoint, read_checkpoint, digest_anew),
    "idx": Reader(make_idx, lambda f: read_idx_pair(f / "images", f / "labels", 10)),
    "images": Reader(make_images, read_images),
    "cifar10": Reader(make_cifar, lambda folder: open_cifar10(folder, 2)),
    "run": Reader(make_run, read_run),
    "timings": Reader(make_timings, explain),
    "recipe": Reader(make_recipe, lambda f: read_recipe(f / "recipe.toml")),
}


@contextmanager
def little_memory_and_time() -> Iterator[None]:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(
        resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY_BYTES, limits[1])
    )

    def too_long(*_: int | FrameType | None) -> None:
        raise AssertionError(f"still reads after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def damage(content: bytes, data: st.DataObject) -> bytes:
    changed = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4), label="times")):
        place = data.draw(st.integers(0, len(changed)), label="place")
        what = data.draw(st.sampled_from(["flip", "cut", "insert", "huge", "repeat"]))
        if what == "flip" and place < len(changed):
            changed[place] ^= data.draw(st.integers(1, 255))
        elif what == "cut":
            del changed[place:]
        elif what == "insert":
            changed[place:place] = data.draw(st.binary(max_size=12))
        elif what == "huge":
            changed[place : place + 4] = b"\x7f\xff\xff\xff"
        elif what == "repeat":
            changed[place:place] = changed[:place] * 3
    return bytes(changed)


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_what_is_damaged_is_read_or_refused(tmp_path: Path, name: str, data: st.DataObject) -> None:
    reader, folder = READERS[name], tmp_path / "files"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    reader.make(folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    file = data.draw(st.sampled_from(files), label="file")
    file.write_bytes(damage(file.read_bytes(), data))
    reader.after(folder)
    with little_memory_and_time():
        said = "read"
        try:
            reader.read(folder)
        except FirecaffeError as error:
            said = str(error)
    assert said


@pytest.mark.parametrize("name", READERS)
def test_what_is_whole_is_read(tmp_path: Path, name: str) -> None:
    READERS[name].make(tmp_path)
    with little_memory_and_time():
        READERS[name].read(tmp_path)


@pytest.mark.parametrize("name", ["run", "recipe", "checkpoint with digests of its own"])
@pytest.mark.parametrize("content", [b"[" * 200_000, b'{"a":' * 100_000, b" " * 17_000_000])
def test_a_file_that_nests_too_deep_or_is_too_long(
    tmp_path: Path, name: str, content: bytes
) -> None:
    READERS[name].make(tmp_path)
    names = ("result.json", "recipe.toml", checkpoints.META)
    next(path for path in tmp_path.rglob("*") if path.name in names).write_bytes(content)
    READERS[name].after(tmp_path)
    with little_memory_and_time(), pytest.raises(FirecaffeError):
        READERS[name].read(tmp_path)
