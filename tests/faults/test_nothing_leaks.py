"""A training that fails leaves no thread, no socket and no shared memory, wherever it fails; and no
folder, however it ends.
"""

import gc
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

import firecaffe
from firecaffe import ExchangeConfig, ModelConfig, Recipe, RunConfig, TrainConfig
from firecaffe.cluster.agree import gather_text
from firecaffe.cluster.world import join
from firecaffe.data import DataConfig
from firecaffe.data.generated import generate
from firecaffe.errors import PeerLostError
from firecaffe.files import private_folder
from firecaffe.training import build_training, learner, training_folder
from firecaffe.transport.local_ranks import connect_local
from tests.world import Ranks

STAGES = {
    "find_start": build_training,
    "open_parts": build_training,
    "make_unsplit": learner,
    "run_probe": learner,
    "make_folder": build_training,
    "meet_local_ranks": learner,
    "Exchange": learner,
    "GradientReducer": learner,
    "rate_notes": training_folder,
    "save_forecast": build_training,
    "Records": build_training,
    "Saver": build_training,
    "PrefetchedBatches": learner,
    "around_batches": learner,
    "Training": build_training,
    "run_training": build_training,
    "write_json": build_training,
}
"""What builds a training, in its order, and where it is called; each is made to fail."""


class StageError(Exception):
    """What a stage raises."""


def fail(*_: Any, **__: Any) -> None:
    raise StageError


def recipe_in(folder: Path, compressor: str = "none") -> Recipe:
    return Recipe(
        model=ModelConfig("lenet"),
        data=DataConfig("generated"),
        train=TrainConfig(global_batch_size=8, micro_batch_size=4, steps=1, eval_batch_size=500),
        exchange=ExchangeConfig(compressor=compressor),
        run=RunConfig(folder=str(folder), tensorboard=False),
    )


def left() -> tuple[set[str], int, int]:
    """Names of threads, and how many local sockets and shared vectors there are."""
    for thread in threading.enumerate():
        # A thread that waits for a lost rank, or writes a verdict, ends by itself, a little later.
        if thread.name in ("exchange", "verdicts"):
            thread.join(60)
    gc.collect()
    own = psutil.Process()
    maps = Path("/proc/self/maps").read_text()
    threads = {each.name for each in threading.enumerate() if each.name != "QueueFeederThread"}
    return threads, len(own.net_connections("unix")), maps.count("memfd:firecaffe")


def test_one_worker_with_every_kind_of_thread(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("firecaffe.data.sources.generate", lambda: generate(0, 60, 20))
    before = left()
    met = []
    for stage in STAGES:
        with monkeypatch.context() as patch:
            patch.setattr(STAGES[stage], stage, fail)
            try:
                firecaffe.train(recipe_in(tmp_path / stage, "int8"))
            except StageError:
                met.append(stage)
        assert left() == before, stage
    assert met == [stage for stage in STAGES if stage != "meet_local_ranks"]  # alone there is none


def fail_on_first(stage: str, folder: str) -> tuple[str, Any, Any]:
    """What ended a training that fails in rank 0's stage; what there was before it, and after."""
    told = ""

    def train() -> None:
        nonlocal told
        try:
            firecaffe.train(recipe_in(Path(folder)))
        except (StageError, PeerLostError) as error:
            told = type(error).__name__

    before = left()
    if os.environ["RANK"] == "0":
        setattr(STAGES[stage], stage, fail)
    train()
    return told, before, left()


@pytest.mark.parametrize("stage", ["Exchange", "save_forecast"])
def test_ranks_that_share_memory(ranks: Ranks, stage: str, tmp_path: Path) -> None:
    for rank, (told, before, after) in enumerate(
        ranks.run(2, fail_on_first, stage, str(tmp_path / "run"))
    ):
        assert told == ("PeerLostError" if rank else "StageError")
        assert after[:2] == before[:2]
        # Rank 1 loses its peer in its first step. Its exchange thread may be connecting to that one
        # for the first time then, in Gloo, and holds what it sums until Gloo gives up.
        if rank == 0:
            assert after[2] == before[2]


def meet(place: str) -> list[str]:
    """What is in the folder for temporary files when ranks have met, after one was killed there."""
    tempfile.tempdir = place
    with private_folder("firecaffe-sockets-") as left_there:
        pass
    left_there.mkdir()
    with join("cpu") as world:
        sockets = connect_local(world, 0, 2, 60.0)
        gather_text(world, "")
        for peer in (sockets or {}).values():
            peer.close()
    return os.listdir(place)


def test_ranks_remove_the_sockets_of_one_that_was_killed(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, meet, str(tmp_path)) == [[], []]


ENDS = """
from multiprocessing.util import get_temp_dir
from firecaffe.cluster.handover import end_process
print(get_temp_dir(), flush=True)  # as for the server that forks data workers
end_process(3)
"""


def test_a_rank_leaves_no_folder_of_sockets(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", ENDS], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, Path(done.stdout.strip()).parent) == (3, tmp_path), done.stderr
    assert not list(tmp_path.iterdir())
