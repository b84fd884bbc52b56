"""A disk slower than ranks may be: nobody is called stuck, and what is not urgent is put off."""

import json
import threading
from pathlib import Path

import pytest

import firecaffe
from firecaffe import CheckpointConfig, ExchangeConfig, Recipe, RunConfig, TrainConfig
from firecaffe.cluster.world import World
from firecaffe.training import build_training, loop, saver
from firecaffe.training.checkpoint import Checkpoint, list_checkpoints
from firecaffe.training.saver import Write
from tests.ranks.networks import Everything, small_data
from tests.world import Ranks

SLOW_S = 4.0
"""The time that the disk takes for one: several times the time-out."""


def train_on_a_slow_disk(folder: str) -> None:
    """The first checkpoint, and the last, are not taken before a while."""
    never = threading.Event()

    def slowly(_: object, write: Write, world: World) -> Write:
        def written(where: Path, checkpoint: Checkpoint) -> Path:
            if checkpoint.step in (2, 12):
                never.wait(SLOW_S)
            return write(where, checkpoint)

        return written

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(build_training, "around_write", slowly)
        patched.setattr(loop, "PATIENCE_S", saver.ROUND_S)
        recipe = Recipe(
            train=TrainConfig(global_batch_size=12, micro_batch_size=2, steps=12),
            exchange=ExchangeConfig(timeout_s=1.0),
            checkpoint=CheckpointConfig(every=2, keep_last=0),
            run=RunConfig(folder=folder, tensorboard=False),
        )
        firecaffe.train(recipe, Everything, small_data(60), small_data(20, 1))


def test_a_slow_disk_is_no_stuck_rank(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, train_on_a_slow_disk, str(tmp_path / "run"))
    found = list_checkpoints(tmp_path / "run" / "checkpoints")
    assert {"step-00000002", "step-00000012"} <= set(found)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["checkpoints"]["put_off"] >= 1
    assert not (tmp_path / "run" / "fault.json").exists()
