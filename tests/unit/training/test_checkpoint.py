"""Checkpoints are written aside, named last, and found again; a damaged one, or one of a stranger,
is refused, nothing is ever unpickled, and one goes on only in a run whose words decide its bits.
"""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

import firecaffe
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
from tests.kit.training import EVERY_STEP, fit_points, recipe_of_points, record_of
from tests.kit.training_fixtures import Capture, Patch
from tests.unit.training.test_state import bits

FILES = (STATE, META, SUMS)


def small(step: int = 3, value: float = 1.0, **words: Any) -> Checkpoint:
    tensors = InMemory({"parameter/w": torch.full((300,), value)})
    return Checkpoint(step, **{"identity": {"a": 1}, "probe": "p", "tensors": tensors, **words})


def test_special_values_come_back(tmp_path: Path) -> None:
    values = torch.tensor([float("nan"), float("inf"), -0.0, 5e-324, 1e-45])
    tensors = InMemory({"parameter/w": values, "buffer/empty": torch.zeros(0, 3)})
    identity = {"a": 0.1, "b": 1e-08, "c": [0.5, 1.0], "d": True, "e": "ü", "f": 0}
    save_checkpoint(tmp_path, small(tensors=tensors, identity=identity))
    loaded = load_newest(tmp_path)[0]
    assert bits(loaded.tensors) == bits(tensors)
    check_identity(loaded, identity, loaded.step)


def test_latest_names_the_newest(tmp_path: Path) -> None:
    first = save_checkpoint(tmp_path / "checkpoints", small(9))
    second = save_checkpoint(tmp_path / "checkpoints", small(10))
    assert (first.name, second.name) == ("step-00000009", "step-00000010")
    assert sorted(path.name for path in second.iterdir()) == sorted(FILES)
    digests = [
        f"{sha256((second / name).read_bytes()).hexdigest()}  {name}\n" for name in FILES[:2]
    ]
    assert (second / SUMS).read_text() == "".join(digests)  # as sha256sum -c reads
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
    newest, older = damaged
    assert (f"{folders[3] / STATE}: damaged" in newest, SUMS in older) == (True, True)
    with pytest.raises(CheckpointError, match="damaged"):
        load_newest(folders[3])  # asked for by name, so no other
    for folder in folders:
        (folder / META).write_text("x")
    with pytest.raises(CheckpointError, match=r"all 4 .* damaged"):
        load_newest(tmp_path)


def test_only_the_newest_stay(tmp_path: Path) -> None:
    for step in (1, 2, 3, 12, 100_000_000):
        save_checkpoint(tmp_path, small(step))
    (tmp_path / "notes").mkdir()
    remove_old(tmp_path, 0)
    assert len(list(tmp_path.glob("step-*"))) == 5
    remove_old(tmp_path, 2)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [LATEST, "notes", "step-00000012", "step-100000000"]


def test_one_that_its_run_removes_while_it_is_read_is_not_damaged(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """A run that goes on keeps its newest one alone."""
    save_checkpoint(tmp_path, small(1))

    def read_late(where: Path) -> Checkpoint:
        if where.name == "step-00000001":
            save_checkpoint(tmp_path, small(2))
            remove_old(tmp_path, 1)
        return load_checkpoint(where)

    monkeypatch.setattr(module, "load_checkpoint", read_late)
    newest, damaged = load_newest(tmp_path)
    assert (newest.step, damaged) == (2, [])


def test_latest_points_to_it_only_after_the_rename(tmp_path: Path, monkeypatch: Patch) -> None:
    save_checkpoint(tmp_path, small(1))
    seen: list[str] = []
    calls = {name: getattr(os, name) for name in ("fsync", "rename", "replace")}

    def note(name: str, first: Any, *more: Path) -> None:
        if name == "fsync":
            seen.append(f"sync {Path(os.readlink(f'/proc/self/fd/{first}')).name}")
        else:
            # Whole before it has its name, and there before `latest` says so.
            load_checkpoint(first if name == "rename" else tmp_path / "step-00000002")
            assert (tmp_path / LATEST).read_text() == "step-00000001\n"
            seen.append(name)
        calls[name](first, *more)

    for name in calls:
        monkeypatch.setattr(os, name, partial(note, name))
    save_checkpoint(tmp_path, small(2))
    assert (tmp_path / LATEST).read_text() == "step-00000002\n"
    folder, files = f"sync {tmp_path.name}", [f"sync {name}" for name in FILES]
    aside = "sync .step-00000002.partial"
    assert seen == [*files, aside, "rename", folder, "sync .partial.latest", "replace", folder]


def refuse(*_: object, **__: object) -> NoReturn:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("target", "name"),
    [
        *((module, name) for name in ("save_tensors", "sha256_of", "sync_file", "sync_folder")),
        *((os, name) for name in ("fsync", "rename", "replace")),
        *((module, "write_atomically"), (Path, "write_text")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_failed_save_leaves_the_old_one_whole(
    tmp_path: Path, monkeypatch: Patch, target: object, name: str
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


def test_what_is_in_the_way_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="step 3 not saved"):
        save_checkpoint(tmp_path / "file", small())
    for where in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(CheckpointError, match="no checkpoint there"):
            load_newest(where)
    # What an earlier fault left is in nobody's.
    aside = tmp_path / ".step-00000003.partial"
    aside.mkdir()
    (aside / STATE).write_bytes(b"half")
    load_checkpoint(save_checkpoint(tmp_path, small()))
    assert not aside.exists()


# --- damage ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("whole"), small())


@pytest.fixture
def folder(tmp_path: Path, whole: Path) -> Path:
    """A copy, to be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def digest_anew(folder: Path) -> None:
    names = (STATE, META)
    sums = [f"{sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    (folder / SUMS).write_text("".join(sums))


@pytest.mark.parametrize("file", FILES)
def test_one_changed_byte_or_another_length(folder: Path, file: str) -> None:
    content = (folder / file).read_bytes()
    size = len(content)
    damaged = []
    for position in {*range(0, size, max(1, size // 40)), size - 1}:
        for mask in (0x01, 0x20, 0xFF):
            changed = bytearray(content)
            changed[position] ^= mask
            damaged.append(bytes(changed))
    # Of SHA256SUMS the last newline may go: what it says is all there; and twice is the same.
    lengths = [0, 1, 8, size // 3, size // 2, size - 2, *([] if file == SUMS else [size - 1])]
    damaged += [content[:length] for length in lengths]
    damaged += [content + b"x", *([] if file == SUMS else [content * 2])]
    for data in damaged:
        (folder / file).write_bytes(data)
        with pytest.raises(CheckpointError):
            load_checkpoint(folder)
    (folder / file).write_bytes(content)
    load_checkpoint(folder)
    (folder / file).unlink()
    with pytest.raises(CheckpointError, match=file):
        load_checkpoint(folder)


def test_damage_is_named(folder: Path) -> None:
    sums = (folder / SUMS).read_text()
    for name in ("x" * 300, "../meta.json"):
        (folder / SUMS).write_text(f"{sums}{'0' * 64}  {name}\n")
        with pytest.raises(CheckpointError, match=r"SHA256SUMS: .* is no name"):
            load_checkpoint(folder)
    (folder / SUMS).write_text(sums.splitlines(keepends=True)[0])  # nothing of the other file
    with pytest.raises(CheckpointError, match=META):
        load_checkpoint(folder)
    (folder / SUMS).write_text(sums)
    (folder / STATE).write_bytes(b"")
    # e3b0c44298fc is SHA-256 of nothing.
    with pytest.raises(CheckpointError, match=rf"{folder / STATE}: damaged.* e3b0c44298fc…"):
        load_checkpoint(folder)


def with_meta(**words: object) -> str:
    meta = {"step": 3, "identity": {}, "probe": "", "history": "", "scalars": {}, "scaler": {}}
    return json.dumps({**meta, **words})


@pytest.mark.parametrize(
    "meta",
    [
        *("", "null", "[]", '"step"', "{}", '{"step": 3}', with_meta()[:-1]),
        *(with_meta(step="x"), with_meta(step=None), with_meta(identity="text")),
        *(with_meta(scalars=[1, 2]), with_meta(scaler=5)),
    ],
)
def test_the_meta_of_a_stranger(folder: Path, meta: str) -> None:
    """Digests agree, but what they digest is nothing of ours."""
    (folder / META).write_text(meta)
    digest_anew(folder)
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_checkpoint(folder)


class Evil:
    """Touches a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("dump", [pickle.dump, torch.save])
def test_nothing_is_unpickled(folder: Path, dump: Callable[..., None]) -> None:
    touched = folder / "touched"
    with (folder / STATE).open("wb") as file:
        dump({"w": Evil(touched)}, file)
    digest_anew(folder)
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_checkpoint(folder)
    assert not touched.exists()


# --- identity -------------------------------------------------------------------------------------

TAKEN = Checkpoint(
    3, {"solver.type": "sgd", "solver.stepvalue": [1, 2], "solver.base_lr": 0.1}, "p"
)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"solver.base_lr": 0.2}, "solver.base_lr is 0.2 in the recipe, 0.1 in the checkpoint"),
        ({"solver.stepvalue": [1, 3]}, r"solver.stepvalue is \[1, 3\] in the recipe, \[1, 2\] in"),
        # What one of the two does not know had its default.
        ({"train.steps": 5}, "train.steps is 5 in the recipe, 0 in the checkpoint"),
        ({"solver.base_lr": None}, "solver.base_lr is 0.01 in the recipe, 0.1 in the checkpoint"),
        ({"model.args": {"width": 3}}, r"model\.args is \{'width': 3\} in the recipe, \{\}"),
        # The first in the alphabet, however many there are.
        ({"solver.type": "adam", "data.name": "x"}, "data.name is 'x'"),
    ],
)
def test_identity_names_the_word(changes: dict[str, Any], words: str) -> None:
    check_identity(TAKEN, {**TAKEN.identity, "model.args": {}, "model.freeze": []}, 3)
    asked = {k: v for k, v in {**TAKEN.identity, **changes}.items() if v is not None}
    with pytest.raises(CheckpointError, match=words):
        check_identity(TAKEN, asked, 3)
    # Fewer steps than the checkpoint's are the cause that is told, not the word (cosine).
    with pytest.raises(CheckpointError, match=r"at step 3, the recipe ends at .* 2;"):
        check_identity(TAKEN, {**TAKEN.identity, "train.steps": 2}, 2)


def test_another_torch_is_told_and_recorded(tmp_path: Path, capsys: Capture) -> None:
    """The first micro-batch, by which machines are compared, may come to the same bits with it."""

    def fit(name: str, steps: int, resume: Path | None = None) -> firecaffe.Result:
        return fit_points(recipe_of_points(tmp_path / name, EVERY_STEP, steps=steps), resume)

    run = fit("run", 1).folder
    same = fit("same", 2, run)
    assert not same.identity_doubts
    file = run / "environment.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "torch": "2.1.0"}))
    capsys.readouterr()
    other = fit("other", 2, run)
    [doubt] = other.identity_doubts
    assert all(part in doubt for part in ("step 1", "torch 2.1.0", torch.__version__))
    assert f"warning: {doubt}" in capsys.readouterr().out
    assert record_of(other.folder)["identity_doubts"] == [doubt]
    assert other.weights_sha256 == same.weights_sha256
