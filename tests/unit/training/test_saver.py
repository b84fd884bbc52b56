"""Checkpoints written beside the training hold the state as it was when they were asked for; and
tensors that are written one at a time are a file as the safetensors library reads it.
"""

import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from firecaffe.errors import CheckpointError, RunError
from firecaffe.training import tensor_file
from firecaffe.training.checkpoint import Checkpoint, load_newest, save_checkpoint
from firecaffe.training.piece import Weights
from firecaffe.training.saver import Saver
from firecaffe.training.state import State
from firecaffe.training.tensor_file import DTYPES, Stored, TensorFile, Under, write_tensors
from firecaffe.transport.collect import HeldPart, Whole
from tests.kit.training import ALONE
from tests.kit.training_fixtures import Patch


def save(saver: Saver, step: int, **tensors: torch.Tensor) -> None:
    state = State(ALONE, {"buffer": Weights(tensors.items)})
    saver.save(Checkpoint(step, {}, "p"), state)


def saved(where: Path) -> Stored:
    return Under(load_newest(where)[0].tensors, "buffer")


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.glob("step-*"))


def test_the_state_may_change_while_it_is_written_and_ranks_wait_a_while(tmp_path: Path) -> None:
    weights = torch.arange(6.0).reshape(2, 3)
    may_write = threading.Event()

    def write(folder: Path, checkpoint: Checkpoint) -> Path:
        assert may_write.wait(300)
        return save_checkpoint(folder, checkpoint)

    saver = Saver(tmp_path, 0, write)
    assert saver.wait(ALONE)
    save(saver, 1, w=weights)
    weights.zero_()  # the training goes on before anything is written
    assert saver.is_writing
    assert not saver.wait(ALONE, 0)
    may_write.set()
    saver.finish(ALONE)
    assert saver.wait(ALONE, 0)
    assert torch.equal(saved(tmp_path)["w"], torch.arange(6.0).reshape(2, 3))
    assert (saver.costs.saved, saver.costs.failed) == (1, 0)


def test_each_checkpoint_has_its_own_state_as_it_is_seen(tmp_path: Path) -> None:
    """Though copies go into the memory of the copies before."""
    whole = torch.randn(4, 3, 5, 5)
    seen = {
        "view": whole[1:3, :, ::2],
        "channels_last": whole.contiguous(memory_format=torch.channels_last),
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 3),
    }
    saver = Saver(tmp_path, 0)
    for step in range(1, 6):
        extra = {"late": torch.full((step,), float(step))} if step > 2 else {}
        save(saver, step, w=torch.full((1000,), float(step)), **seen, **extra)
    saver.finish(ALONE)
    for step in range(1, 6):
        tensors = saved(tmp_path / f"step-{step:08d}")
        assert torch.equal(tensors["w"], torch.full((1000,), float(step)))
        assert ("late" in tensors) == (step > 2)
        assert step < 3 or tensors["late"].tolist() == [float(step)] * step
        assert all(torch.equal(tensors[name], each) for name, each in seen.items())


def test_a_full_disk_is_told_once_and_the_next_one_is_saved(tmp_path: Path) -> None:
    said: list[str] = []

    def write(folder: Path, checkpoint: Checkpoint) -> Path:
        if checkpoint.step == 2:
            raise CheckpointError("checkpoint of step 2 not saved: No space left on device")
        return save_checkpoint(folder, checkpoint)

    saver = Saver(tmp_path, 0, write, said.append)
    for step in (1, 2, 3):
        save(saver, step, w=torch.zeros(3))
    saver.finish(ALONE)
    assert len(said) == 1
    assert said[0].startswith("warning: checkpoint of step 2 not saved: No space left on device")
    assert steps_in(tmp_path) == [1, 3]
    assert (saver.costs.saved, saver.costs.failed) == (2, 1)
    (tmp_path / "file").touch()
    saver = Saver(tmp_path / "file", 3)  # in the folder's place
    save(saver, 1, w=torch.zeros(3))
    with pytest.raises(CheckpointError, match="checkpoint of step 1 not saved"):
        saver.finish(ALONE)


def test_a_plugin_that_ends_the_thread_is_told(tmp_path: Path) -> None:
    said: list[str] = []

    def write(*_: object) -> Path:
        raise SystemExit("no place to copy it to")

    saver = Saver(tmp_path, 0, write, said.append)
    save(saver, 1, w=torch.zeros(3))
    with pytest.raises(CheckpointError, match="no place to copy it to"):
        saver.finish(ALONE)
    assert (len(said), saver.costs.failed) == (1, 1)


def test_old_ones_go_only_after_a_new_one_is_there(tmp_path: Path) -> None:
    def refuse(*_: object) -> Path:
        raise CheckpointError("full")

    saver = Saver(tmp_path, 2)
    for step in (1, 2, 3, 4):
        save(saver, step, w=torch.zeros(3))
    saver.finish(ALONE)
    assert steps_in(tmp_path) == [3, 4]
    saver = Saver(tmp_path, 2, refuse)
    save(saver, 5, w=torch.zeros(3))
    with pytest.raises(CheckpointError):
        saver.finish(ALONE)
    assert steps_in(tmp_path) == [3, 4]


class Apart:
    """A piece that is written in the step's time; here one rank has all of it."""

    held_by_all = False
    is_result = False

    def __init__(self, **tensors: torch.Tensor) -> None:
        self.tensors = tensors

    def parts(self) -> dict[str, HeldPart]:
        return {name: HeldPart(tensor) for name, tensor in self.tensors.items()}

    def load(self, stored: Stored) -> None:
        self.tensors = dict(stored)


def test_what_is_held_in_parts_has_its_own_file(tmp_path: Path, monkeypatch: Patch) -> None:
    """And is not in the checkpoints' folder, half or whole, where its checkpoint is not saved."""
    memory = Apart(a=torch.arange(4.0).view(2, 2).T, b=torch.tensor([True, False]))
    weights = Weights({"w": torch.ones(2)}.items)
    state = State(ALONE, {"buffer": weights, "memory": memory})
    saver = Saver(tmp_path, 0)
    saver.save(Checkpoint(1, {}, "p"), state)
    saver.finish(ALONE)
    memory.tensors["a"] = torch.ones(100_000)
    with monkeypatch.context() as full:
        full.setattr(tensor_file, "create_empty", lambda _: Path("/dev/full"))
        saver.save(Checkpoint(2, {}, "p"), state)
    with pytest.raises(CheckpointError, match=r"step 2 not saved: .*No space left"):
        saver.finish(ALONE)
    memory.tensors["a"] = torch.zeros(3)
    saver.save(Checkpoint(3, {}, "p"), state)
    saver.finish(ALONE)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["latest", "step-00000001", "step-00000003"]
    for step, expected in ((1, torch.tensor([[0.0, 2.0], [1.0, 3.0]])), (3, torch.zeros(3))):
        checkpoint = load_newest(tmp_path / f"step-{step:08d}")[0]
        assert list(checkpoint.tensors) == ["buffer/w"]
        loaded = Apart()
        State(ALONE, {"buffer": weights, "memory": loaded}).load(checkpoint)
        assert torch.equal(loaded.tensors["a"], expected)
        assert loaded.tensors["b"].tolist() == [True, False]


def test_a_folder_that_is_gone_ends_the_run_and_is_not_made_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    said: list[str] = []
    saver = Saver(run / "checkpoints", 0, warn=said.append)
    shutil.rmtree(run)
    save(saver, 1, w=torch.ones(3))
    for ask in (saver.wait, saver.finish):
        with pytest.raises(RunError, match="is gone"):
            ask(ALONE)
    assert not run.exists()
    assert "step 1 not saved" in said[0]


TENSORS = {
    **{str(dtype): torch.arange(7).to(dtype) for dtype in DTYPES},
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 3),
    "matrix/é": torch.randn(3, 5),
}
LISTED = [Whole(n, tuple(each.shape), each.dtype, ((0, None),)) for n, each in TENSORS.items()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of all of these."""
    path = tmp_path / "some.safetensors"
    assert write_tensors(path, LISTED, TENSORS.items()) is None
    return path


def raw(tensor: Tensor) -> Tensor:
    """Its bytes; torch compares no float8."""
    return tensor.reshape(-1).view(torch.uint8)


def test_the_library_reads_what_was_written_one_by_one(path: Path) -> None:
    found, one_by_one = load_file(path), TensorFile(path)
    assert found.keys() == TENSORS.keys() == set(one_by_one)
    for name, each in TENSORS.items():
        for read in (found[name], one_by_one[name]):
            assert (read.dtype, read.shape) == (each.dtype, each.shape)
            assert torch.equal(raw(read), raw(each))


def test_rows_are_read_without_the_others(path: Path) -> None:
    name, matrix = next(reversed(TENSORS.items()))
    file = Under(TensorFile(path), "matrix")
    with open(path, "r+b") as damaged:  # the file's last row, which is not asked for
        damaged.truncate(path.stat().st_size - 4)
    for rows in (range(0), range(2), range(1, 2), range(3, 3)):
        assert torch.equal(file.rows("é", rows), matrix[rows.start : rows.stop])
    assert (list(file), file.shape("é"), file.dtype("é")) == (["é"], (3, 5), torch.float32)
    assert file.full_name("é") == name
    with pytest.raises(CheckpointError, match="cut short"):
        file["é"]
    with pytest.raises(IndexError):
        file.rows("é", range(2, 4))


def test_a_full_disk_takes_nothing_and_all_is_gone_through(monkeypatch: Patch) -> None:
    """For other ranks send it, and would wait."""
    taken: list[str] = []

    def coming() -> Iterator[tuple[str, Tensor]]:
        for name, each in TENSORS.items():
            yield name, each.new_zeros(100_000)
            taken.append(name)

    monkeypatch.setattr(tensor_file, "create_empty", lambda path: path)
    problem = write_tensors(Path("/dev/full"), LISTED, coming())
    assert problem is not None
    assert "No space left" in str(problem)
    assert taken == list(TENSORS)


def test_a_file_that_cannot_be_read_is_refused(path: Path) -> None:
    """Cut short, of sizes beside a 0 that nobody can count with, or no regular one."""
    whole = path.read_bytes()
    for shape in ([0, 2**64 - 1], [2**63, 0], [0, 2**62, 8]):
        header = {"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text)
        with pytest.raises(CheckpointError, match="a has the shape"):
            TensorFile(path)
    for data in (whole[:length] for length in (0, 5, 100)):
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=r"some\.safetensors"):
            TensorFile(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match=r"some\.safetensors"):
        TensorFile(path)  # which is not waited for
