"""Checkpoints written beside the training hold the state as it was when they were asked for."""

import shutil
import threading
from pathlib import Path

import pytest
import torch

from firecaffe.cluster.world import World
from firecaffe.errors import CheckpointError, RunError
from firecaffe.training import tensor_file
from firecaffe.training.checkpoint import Checkpoint, load_newest, save_checkpoint
from firecaffe.training.piece import Weights
from firecaffe.training.saver import Saver
from firecaffe.training.state import State
from firecaffe.training.tensor_file import Stored, Under
from firecaffe.transport.collect import HeldPart

CPU = World(0, 1, torch.device("cpu"))


def save(saver: Saver, step: int, **tensors: torch.Tensor) -> None:
    state = State(CPU, {"buffer": Weights(tensors.items)})
    saver.save(Checkpoint(step, {}, "p"), state)


def saved(where: Path) -> Stored:
    return Under(load_newest(where)[0].tensors, "buffer")


def test_the_state_may_change_while_it_is_written(tmp_path: Path) -> None:
    weights = torch.arange(6.0).reshape(2, 3)
    may_write = threading.Event()

    def write(folder: Path, checkpoint: Checkpoint) -> Path:
        assert may_write.wait(300)
        return save_checkpoint(folder, checkpoint)

    saver = Saver(tmp_path, 0, write)
    save(saver, 1, w=weights)
    weights.zero_()  # the training goes on before anything is written
    may_write.set()
    saver.finish()
    assert torch.equal(saved(tmp_path)["w"], torch.arange(6.0).reshape(2, 3))
    assert (saver.costs.saved, saver.costs.failed) == (1, 0)


def test_each_checkpoint_has_its_own_state(tmp_path: Path) -> None:
    """Though copies go into the memory of the copies before."""
    saver = Saver(tmp_path, 0)
    for step in range(1, 6):
        extra = {"late": torch.full((4,), float(step))} if step > 2 else {}
        save(saver, step, w=torch.full((1000,), float(step)), **extra)
    saver.finish()
    for step in range(1, 6):
        tensors = saved(tmp_path / f"step-{step:08d}")
        assert torch.equal(tensors["w"], torch.full((1000,), float(step)))
        assert ("late" in tensors) == (step > 2)


def test_views_and_layouts_are_saved_as_they_are_seen(tmp_path: Path) -> None:
    whole = torch.randn(4, 3, 5, 5)
    seen = {
        "view": whole[1:3, :, ::2],
        "channels_last": whole.contiguous(memory_format=torch.channels_last),
        "scalar": torch.tensor(3.0),
        "counter": torch.tensor([7]),
        "empty": torch.zeros(0, 3),
    }
    saver = Saver(tmp_path, 0)
    save(saver, 1, **seen)
    saver.finish()
    tensors = saved(tmp_path)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in seen.items())


def test_a_full_disk_is_told_once_and_the_next_one_is_saved(tmp_path: Path) -> None:
    said: list[str] = []

    def write(folder: Path, checkpoint: Checkpoint) -> Path:
        if checkpoint.step == 2:
            raise CheckpointError("checkpoint of step 2 not saved: No space left on device")
        return save_checkpoint(folder, checkpoint)

    saver = Saver(tmp_path, 0, write, said.append)
    for step in (1, 2, 3):
        save(saver, step, w=torch.zeros(3))
    saver.finish()
    assert len(said) == 1
    assert said[0].startswith("warning: checkpoint of step 2 not saved: No space left on device")
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-00000001", "step-00000003"]
    assert (saver.costs.saved, saver.costs.failed) == (2, 1)


def test_a_last_one_that_is_not_saved_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").touch()  # in the folder's place
    saver = Saver(tmp_path / "checkpoints", 3)
    save(saver, 1, w=torch.zeros(3))
    with pytest.raises(CheckpointError, match="checkpoint of step 1 not saved"):
        saver.finish()


def test_old_ones_go_only_after_a_new_one_is_there(tmp_path: Path) -> None:
    saver = Saver(tmp_path, 2)
    for step in (1, 2, 3, 4):
        save(saver, step, w=torch.zeros(3))
    saver.finish()
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-00000003", "step-00000004"]
    (tmp_path / ".step-00000005.partial").touch()  # where the next one would be written

    def refuse(*_: object) -> Path:
        raise CheckpointError("full")

    saver = Saver(tmp_path, 2, refuse)
    save(saver, 5, w=torch.zeros(3))
    with pytest.raises(CheckpointError):
        saver.finish()
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-00000003", "step-00000004"]


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


def test_what_is_held_in_parts_has_a_file_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is not in the checkpoints' folder, half or whole, where its checkpoint is not saved."""
    memory = Apart(a=torch.arange(4.0).view(2, 2).T, b=torch.tensor([True, False]))
    state = State(CPU, {"buffer": Weights({"w": torch.ones(2)}.items), "memory": memory})
    saver = Saver(tmp_path, 0)
    saver.save(Checkpoint(1, {}, "p"), state)
    saver.finish()
    memory.tensors["a"] = torch.ones(100_000)
    with monkeypatch.context() as full:
        full.setattr(tensor_file, "new_aside", lambda _: Path("/dev/full"))
        saver.save(Checkpoint(2, {}, "p"), state)
    with pytest.raises(CheckpointError, match=r"step 2 not saved: .*No space left"):
        saver.finish()
    memory.tensors["a"] = torch.zeros(3)
    saver.save(Checkpoint(3, {}, "p"), state)
    saver.finish()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "latest",
        "step-00000001",
        "step-00000003",
    ]
    for step, expected in ((1, torch.tensor([[0.0, 2.0], [1.0, 3.0]])), (3, torch.zeros(3))):
        checkpoint = load_newest(tmp_path / f"step-{step:08d}")[0]
        assert list(checkpoint.tensors) == ["buffer/w"]
        loaded = Apart()
        State(CPU, {"buffer": Weights({"w": torch.ones(2)}.items), "memory": loaded}).load(
            checkpoint
        )
        assert torch.equal(loaded.tensors["a"], expected)
        assert loaded.tensors["b"].tolist() == [True, False]


def test_ranks_wait_for_a_slow_disk_for_a_while(tmp_path: Path) -> None:
    may_write = threading.Event()

    def write(folder: Path, checkpoint: Checkpoint) -> Path:
        assert may_write.wait(300)
        return save_checkpoint(folder, checkpoint)

    saver = Saver(tmp_path / "checkpoints", 0, write)
    assert saver.wait(CPU)
    save(saver, 1, w=torch.ones(3))
    assert saver.is_writing
    assert not saver.wait(CPU, 0)
    may_write.set()
    saver.finish_together(CPU)
    assert saver.wait(CPU, 0)


def test_a_folder_that_is_gone_ends_the_run_and_is_not_made_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    said: list[str] = []
    saver = Saver(run / "checkpoints", 0, warn=said.append)
    shutil.rmtree(run)
    save(saver, 1, w=torch.ones(3))
    for ask in (saver.wait, saver.finish_together):
        with pytest.raises(RunError, match="is gone"):
            ask(CPU)
    assert not run.exists()
    assert "step 1 not saved" in said[0]
