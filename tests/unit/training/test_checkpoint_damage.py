"""A damaged checkpoint, or one of a stranger, is refused; nothing is ever unpickled."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from firecaffe.errors import CheckpointError
from firecaffe.training import checkpoint as module
from firecaffe.training.checkpoint import (
    META,
    STATE,
    SUMS,
    Checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from firecaffe.training.tensor_file import InMemory

FILES = (STATE, META, SUMS)


def small(step: int = 3, value: float = 1.0) -> Checkpoint:
    tensors = InMemory({"parameter/w": torch.full((300,), value)})
    return Checkpoint(step, {"a": 1}, "p", "h", tensors)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_checkpoint(tmp_path_factory.mktemp("whole"), small())
    load_checkpoint(folder)
    return folder


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("mask", [0x01, 0x20, 0xFF])
def test_one_changed_byte_anywhere(tmp_path: Path, whole: Path, file: str, mask: int) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "copy"))
    content = (whole / file).read_bytes()
    positions = {*range(0, len(content), max(1, len(content) // 40)), len(content) - 1}
    for position in sorted(positions):
        damaged = bytearray(content)
        damaged[position] ^= mask
        (folder / file).write_bytes(damaged)
        with pytest.raises(CheckpointError):
            load_checkpoint(folder)
    (folder / file).write_bytes(content)
    load_checkpoint(folder)


@pytest.mark.parametrize("file", FILES)
def test_another_length(tmp_path: Path, whole: Path, file: str) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "copy"))
    content = (whole / file).read_bytes()
    size = len(content)
    # Of SHA256SUMS the last newline may go: what it says is all there.
    shorter = [0, 1, 8, size // 3, size // 2, size - 2, *([] if file == SUMS else [size - 1])]
    for damaged in [*(content[:length] for length in shorter), content + b"x", content * 2]:
        if file == SUMS and damaged == content * 2:
            continue  # says the same twice
        (folder / file).write_bytes(damaged)
        with pytest.raises(CheckpointError):
            load_checkpoint(folder)


@pytest.mark.parametrize("file", FILES)
def test_a_missing_file(tmp_path: Path, whole: Path, file: str) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "copy"))
    (folder / file).unlink()
    with pytest.raises(CheckpointError, match=file):
        load_checkpoint(folder)


def test_damage_is_named(tmp_path: Path, whole: Path) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "copy"))
    (folder / STATE).write_bytes(b"")
    sums = (folder / SUMS).read_text().split()
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(folder)
    # e3b0c44298fc is SHA-256 of nothing.
    assert f"{folder / STATE}: damaged; its SHA-256 is e3b0c44298fc…" in str(caught.value)
    assert f"SHA256SUMS says {sums[0][:12]}…" in str(caught.value)


@pytest.mark.parametrize("name", ["x" * 300, "../meta.json"])
def test_sums_of_what_is_no_file_of_a_checkpoint(tmp_path: Path, whole: Path, name: str) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "copy"))
    with (folder / SUMS).open("a") as file:
        file.write(f"{'0' * 64}  {name}\n")
    with pytest.raises(CheckpointError, match=r"SHA256SUMS: .* is no name"):
        load_checkpoint(folder)


class Evil:
    """Touches a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.path,)


def with_meta(**words: object) -> str:
    meta = {"step": 3, "identity": {}, "probe": "", "history": "", "scalars": {}, "scaler": {}}
    return json.dumps({**meta, **words})


@pytest.mark.parametrize(
    "meta",
    [
        "",
        "null",
        "[]",
        '"step"',
        "{}",
        '{"step": 3}',
        with_meta(step="x"),
        with_meta(step=None),
        with_meta(identity="text"),
        with_meta(scalars=[1, 2]),
        with_meta(scaler=5),
        with_meta()[:-1],
    ],
)
def test_the_meta_of_a_stranger(tmp_path: Path, whole: Path, meta: str) -> None:
    """Digests agree, but what they digest is nothing of ours."""
    folder = Path(shutil.copytree(whole, tmp_path / "copy"))
    (folder / META).write_text(meta)
    digest_anew(folder)
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_checkpoint(folder)


def test_nothing_is_unpickled(tmp_path: Path, whole: Path) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "copy"))
    (folder / STATE).write_bytes(pickle.dumps(Evil(tmp_path / "touched")))
    digest_anew(folder)
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_checkpoint(folder)
    torch.save({"w": Evil(tmp_path / "touched")}, folder / STATE)
    digest_anew(folder)
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_checkpoint(folder)
    assert not (tmp_path / "touched").exists()


def digest_anew(folder: Path) -> None:
    sums = [f"{module._sha256(folder / name)}  {name}\n" for name in (STATE, META)]
    (folder / SUMS).write_text("".join(sums))
