"""Checkpoints are written aside, named last, and found again."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor

from firecaffe.errors import CheckpointError
from firecaffe.training import checkpoint as module
from firecaffe.training.checkpoint import (
    LATEST,
    META,
    STATE,
    SUMS,
    Checkpoint,
    check_identity,
    load_checkpoint,
    load_newest,
    remove_old,
    save_checkpoint,
)
from firecaffe.training.tensor_file import InMemory

FILES = (STATE, META, SUMS)


def small(step: int = 3, value: float = 1.0) -> Checkpoint:
    tensors = InMemory({"parameter/w": torch.full((300,), value)})
    return Checkpoint(step, {"a": 1}, "p", "h", tensors)


def bits(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Any, ...]]:
    """What must come back: dtype, shape, layout and every byte."""
    return {
        name: (t.dtype, t.shape, t.stride(), t.contiguous().view(-1).view(torch.uint8).tolist())
        for name, t in tensors.items()
    }


def test_special_values_come_back(tmp_path: Path) -> None:
    values = torch.tensor([float("nan"), float("inf"), -0.0, 5e-324, 1e-45])
    checkpoint = small()
    checkpoint.tensors = InMemory({"parameter/w": values, "buffer/empty": torch.zeros(0, 3)})
    save_checkpoint(tmp_path, checkpoint)
    assert bits(load_newest(tmp_path)[0].tensors) == bits(checkpoint.tensors)


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="no sha256sum here")
def test_sha256sum_agrees(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, small())
    command = ["sha256sum", "--strict", "-c", SUMS]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{STATE}: OK", f"{META}: OK"]


def test_latest_names_the_newest(tmp_path: Path) -> None:
    first = save_checkpoint(tmp_path / "checkpoints", small(9))
    second = save_checkpoint(tmp_path / "checkpoints", small(10))
    assert (first.name, second.name) == ("step-00000009", "step-00000010")
    assert sorted(path.name for path in second.iterdir()) == sorted(FILES)
    for where in (tmp_path, tmp_path / "checkpoints", second):
        checkpoint, damaged = load_newest(where)
        assert (checkpoint.step, damaged) == (10, [])
    assert load_newest(first)[0].step == 9
    assert (tmp_path / "checkpoints" / LATEST).read_text() == f"{second.name}\n"


def test_the_newest_that_verifies_is_taken_and_the_damage_told(tmp_path: Path) -> None:
    folders = [save_checkpoint(tmp_path, small(step, float(step))) for step in (8, 9, 10, 11)]
    (folders[3] / STATE).write_bytes(b"")
    (folders[2] / SUMS).unlink()
    checkpoint, damaged = load_newest(tmp_path)
    assert checkpoint.step == 9
    assert torch.equal(checkpoint.tensors["parameter/w"], torch.full((300,), 9.0))
    assert [f"{folders[3] / STATE}: damaged" in damaged[0], SUMS in damaged[1]] == [True, True]
    assert len(damaged) == 2
    with pytest.raises(CheckpointError, match="damaged"):
        load_newest(folders[3])  # asked for by name, so no other
    for folder in folders:
        (folder / META).write_text("x")
    with pytest.raises(CheckpointError, match=r"all 4 .* damaged"):
        load_newest(tmp_path)


def test_only_the_newest_stay(tmp_path: Path) -> None:
    for step in (1, 2, 3, 12, 100_000_000):
        save_checkpoint(tmp_path, small(step))
    stranger = tmp_path / "notes"
    stranger.mkdir()
    remove_old(tmp_path, 0)
    assert len(list(tmp_path.glob("step-*"))) == 5
    remove_old(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        LATEST,
        "notes",
        "step-00000012",
        "step-100000000",
    ]


def test_latest_points_to_it_only_after_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, small(1))
    seen: list[str] = []
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def latest() -> str:
        return (tmp_path / LATEST).read_text().strip()

    def note_fsync(descriptor: int) -> None:
        seen.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        fsync(descriptor)

    def note_rename(source: Path, target: Path) -> None:
        load_checkpoint(source)  # whole before it has its name
        assert not target.exists()
        assert latest() == "step-00000001"
        seen.append("rename")
        rename(source, target)

    def note_replace(source: Path, target: Path) -> None:
        load_checkpoint(tmp_path / "step-00000002")
        assert latest() == "step-00000001"
        seen.append("latest")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "rename", note_rename)
    monkeypatch.setattr(os, "replace", note_replace)
    save_checkpoint(tmp_path, small(2))
    assert latest() == "step-00000002"
    folder = f"sync {tmp_path.name}"
    files = [f"sync {name}" for name in FILES]
    aside = "sync .step-00000002.partial"
    assert seen == [*files, aside, "rename", folder, "sync .partial.latest", "latest", folder]


def refuse(*_: object, **__: object) -> NoReturn:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("target", "name"),
    [
        (module, "save_file"),
        (module, "_sha256"),
        (module, "sync_file"),
        (Path, "write_text"),
        (os, "fsync"),
        (os, "rename"),
        (module, "sync_folder"),
        (os, "replace"),
        (module, "write_atomically"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_failed_save_leaves_the_old_one_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: object, name: str
) -> None:
    old = save_checkpoint(tmp_path, small(1, 1.5))
    with monkeypatch.context() as broken:
        broken.setattr(target, name, refuse)
        with pytest.raises(CheckpointError, match=r"checkpoint of step 2 not saved: .*No space"):
            save_checkpoint(tmp_path, small(2))
    assert load_newest(tmp_path)[0].step in (1, 2)  # whole, whichever it is
    assert load_newest(tmp_path)[1] == []
    assert torch.equal(load_checkpoint(old).tensors["parameter/w"], torch.full((300,), 1.5))
    assert [p.name for p in tmp_path.iterdir() if p.name.endswith(".partial")] == []
    save_checkpoint(tmp_path, small(2))
    assert load_newest(tmp_path)[0].step == 2


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").touch()
    with pytest.raises(CheckpointError, match="step 3 not saved"):
        save_checkpoint(tmp_path / "checkpoints", small())


def test_what_an_earlier_fault_left_is_in_nobodys_way(tmp_path: Path) -> None:
    aside = tmp_path / ".step-00000003.partial"
    aside.mkdir()
    (aside / STATE).write_bytes(b"half")
    folder = save_checkpoint(tmp_path, small())
    load_checkpoint(folder)
    assert not aside.exists()


def test_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    for where in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(CheckpointError, match="no checkpoint there"):
            load_newest(where)


def test_identity_survives_the_file(tmp_path: Path) -> None:
    identity = {"a": 0.1, "b": 1e-08, "c": [0.5, 1.0], "d": True, "e": "ü", "f": 0}
    checkpoint = small()
    checkpoint.identity = identity
    save_checkpoint(tmp_path, checkpoint)
    check_identity(load_newest(tmp_path)[0], identity, checkpoint.step)
