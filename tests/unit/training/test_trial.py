"""Other processes: trainings side by side, and data workers, of which none is left behind."""

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import Dataset

from firecaffe import from_torch
from firecaffe.cluster.agent import SIGNALS
from firecaffe.cluster.launcher import RankFailedError
from firecaffe.data import Data, DataConfig, DataParts, current_key, divide
from firecaffe.data.batches import Batches, PrefetchedBatches, eval_batches
from firecaffe.data.dataset import same_bits
from firecaffe.data.own_data import check_own
from firecaffe.data.sample_order import SampleOrder
from firecaffe.errors import (
    DataError,
    MemoryFullError,
    OwnCodeError,
    PreemptedError,
    RunError,
    WorkerKilledError,
)
from firecaffe.training import data_workers as data_workers_module
from firecaffe.training import trial as trial_module
from firecaffe.training.data_workers import data_workers
from firecaffe.training.trial import (
    Trial,
    TrialScore,
    command_lock,
    environment_of,
    run_trials,
    scores,
)
from tests.kit.training import recipe_with
from tests.kit.training_fixtures import Patch
from tests.world import fork_server

# --- trainings side by side -----------------------------------------------------------------------

SCRIPT = """
import json, sys, time, tomllib
from pathlib import Path
recipe = tomllib.loads(Path(sys.argv[1]).read_text())
folder = Path(recipe["run"]["folder"])
folder.mkdir()
def test(step, top1):
    row = {"kind": "validation", "step": step, "top1": top1, "loss": 1.0}
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(row) + "\\n")
mode = recipe["model"]["name"]
test(1, 0.1)
if mode == "fails":
    print("firecaffe: rank 0 ran out of luck")
    sys.exit(9)
if mode == "diverges":
    (folder / "fault.json").write_text('{"kind": "not_finite", "step": 2}')
    sys.exit(18)
if mode == "waits":
    (folder / "waits").touch()
    time.sleep(600)
test(2, 0.2)
(folder / "result.json").write_text("{}")
"""


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: Patch) -> Path:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script)]
    monkeypatch.setattr(trial_module, "command_of", lambda recipe, _: [*command, str(recipe)])
    monkeypatch.setattr(trial_module, "POLL_S", 0.05)
    return tmp_path / "search"


def trial(parent: Path, name: str, mode: str = "ends", **words: Any) -> Trial:
    return Trial(name, recipe_with({"model.name": mode, "train.steps": 2}), parent, **words)


def left(parent: Path) -> list[psutil.Process]:
    """Trainings that are at work."""
    return [p for p in psutil.Process().children() if str(parent) in " ".join(p.cmdline())]


def run(trials: Sequence[Trial], parent: Path, at_once: int = 2) -> list[str]:
    """The names, as they ended."""
    ended: list[str] = []
    with command_lock(parent) as lock:
        run_trials(trials, at_once, 1, lock, lambda each: ended.append(each.name))
    return ended


def test_a_search_goes_on_over_trainings_that_end_are_given_up_or_diverge(parent: Path) -> None:
    told = [TrialScore(1, 0.1, True), TrialScore(2, 0.2, True)]
    right = trial(parent, "a")
    hopeless = trial(parent, "b", "waits", end=lambda told: len(told) == 1)
    diverging = trial(parent, "c", "diverges", end=lambda told: not told[-1].is_finite)
    assert sorted(run([right, hopeless, diverging], parent)) == ["a", "b", "c"]
    assert [each.ended_early for each in (right, hopeless, diverging)] == [False, True, True]
    assert (right.scores, right.is_finished, hopeless.is_finished) == (told, True, False)
    assert diverging.scores == [TrialScore(1, 0.1, True), TrialScore(2, 0.1, False)]
    again = trial(parent, "b", "waits", end=lambda told: len(told) == 1)
    assert run([again], parent) == ["b"]  # at once, from what is there
    assert again.scores == hopeless.scores
    assert not list(parent.glob("b.left-*"))
    with pytest.raises(RankFailedError):  # where nobody is to give it up, as of a finalist's seed
        run([trial(parent, "d", "diverges")], parent)


def test_finished_trainings_are_taken_and_left_ones_begun_anew(parent: Path) -> None:
    run([trial(parent, "a")], parent)
    (parent / "b").mkdir()
    before = (parent / "a" / "metrics.jsonl").stat().st_mtime_ns
    assert run([trial(parent, "a"), trial(parent, "b")], parent) == ["a", "b"]
    assert (parent / "a" / "metrics.jsonl").stat().st_mtime_ns == before
    assert (parent / "b.left-1").is_dir()
    # Another training's folder is not taken, as where a larger budget has found another best.
    other = trial(parent, "a")
    other.recipe = other.recipe.replace("train.seed", 7)
    assert not other.is_there
    run([other], parent)
    assert (parent / "a.left-1" / "result.json").exists()
    assert other.is_there


def test_one_that_fails_ends_the_search_and_the_others(parent: Path) -> None:
    with pytest.raises(RankFailedError) as caught:
        run([trial(parent, "a", "fails"), trial(parent, "b", "waits")], parent)
    assert str(caught.value) == f"a: rank 0 ran out of luck (see {parent / 'a.log'})"
    assert caught.value.exit_code == 9
    assert not left(parent)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_search_that_is_asked_to_stop_leaves_no_training(
    parent: Path, number: int, monkeypatch: Patch
) -> None:
    """Nor if it is asked while it starts one."""
    before = signal.getsignal(number)

    def here(*_: object) -> None:  # else a fault would end the tests
        pytest.fail("nobody heard it")

    signal.signal(number, here)

    class Asking(subprocess.Popen[bytes]):
        def __init__(self, *words: Any, **options: Any) -> None:
            super().__init__(*words, **options)
            os.kill(os.getpid(), number)

    monkeypatch.setattr(subprocess, "Popen", Asking)
    with pytest.raises(PreemptedError, match="the same command continues it"):
        run([trial(parent, "a", "waits"), trial(parent, "b", "waits")], parent)
    assert not left(parent)
    assert signal.getsignal(number) is here
    signal.signal(number, before)


def test_two_searches_never_work_in_one_folder(parent: Path) -> None:
    """Nor one where another has left a training: it holds the lock as long as it lives."""
    with command_lock(parent) as lock:
        with pytest.raises(RunError, match="another command works there"), command_lock(parent):
            pass
        begun = trial_module._start(trial(parent, "a", "waits"), 1, 0, lock)
    try:
        with pytest.raises(RunError, match="or a training that one has left"), command_lock(parent):
            pass
    finally:
        begun.kill()
        begun.wait()
    with command_lock(parent):
        pass


def test_scores_that_cannot_be_read(tmp_path: Path) -> None:
    assert scores(tmp_path) == []
    path = tmp_path / "metrics.jsonl"
    row = {"kind": "validation", "step": 3, "top1": 0.5, "loss": None}
    path.write_text(json.dumps(row) + "\n{")
    assert scores(tmp_path) == [TrialScore(3, 0.5, False)]
    path.write_text('["validation"]\n')
    with pytest.raises(RunError, match=r"metrics\.jsonl: cannot be read"):
        scores(tmp_path)


def test_each_slot_has_gpus_of_its_own(monkeypatch: Patch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    shown = [environment_of(slot, 2).get("CUDA_VISIBLE_DEVICES") for slot in (0, 1, 2)]
    assert shown == ["0,1", "2,3", None]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert environment_of(1, 1)["CUDA_VISIBLE_DEVICES"] == "7"


# --- data workers ---------------------------------------------------------------------------------

COUNT = 12


class Drawn(Dataset[Any]):
    """Items that draw from all generators; one raises, one ends its process, one never comes."""

    def __init__(self, raises: int = -1, ends: int = -1, waits: int = -1) -> None:
        self.raises, self.ends, self.waits = raises, ends, waits

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        if index == self.raises:
            raise ValueError("nothing there")
        if index == self.ends:
            os.kill(os.getpid(), signal.SIGKILL)
        if index == self.waits:
            threading.Event().wait()
        drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        key = torch.tensor(current_key())
        return {"drawn": torch.tensor(drawn), "key": key}, (index, float(os.getpid()))


def of_workers(workers: int, **words: int) -> Data:
    """Training, held-out and test samples, made by so many workers."""
    names = ("train", "test")
    train, test = (check_own(name, from_torch(Drawn(**words), workers)) for name in names)
    return divide(DataParts(train, test), DataConfig(hold_out=0.25))


@pytest.fixture(autouse=True)
def _server() -> None:
    """The tests' fork server, which has torch loaded, before one is started that has less."""
    fork_server()
    forkserver.ensure_running()


def batches_of(data: Data) -> Iterator[Any]:
    """Those of an epoch of training, and of an evaluation; by whom they were made is left out."""
    order = SampleOrder(4, len(data.train), 6, 2)
    ahead = PrefetchedBatches(Batches(data.train, order, DataConfig()), range(3), 0, 2)
    for step in range(2):
        for leaf in range(3):
            yield ahead.train_batch(step, leaf)
    ahead.close()
    assert data.validation is not None
    for part in (data.validation, data.test):
        for _, inputs, targets in eval_batches(part, 5, 0, 1, config=DataConfig()):
            yield inputs, targets


def makers_of(batches: Iterable[Any]) -> set[int]:
    return {int(process) for batch in batches for process in batch[1][1].tolist()}


def test_the_same_bits_from_other_processes_which_end() -> None:
    expected = list(batches_of(of_workers(0)))
    assert makers_of(expected) <= {os.getpid()}
    data = of_workers(2)
    with data_workers(data):
        found = list(batches_of(data))
    makers = makers_of(found)
    assert os.getpid() not in makers
    assert 2 <= len(makers) <= 4  # two for training and what is held out of it, two for the test
    assert not any(psutil.pid_exists(maker) for maker in makers)
    for one, other in zip(expected, found, strict=True):
        assert same_bits((one[0], one[1][0]), (other[0], other[1][0]))
    with pytest.raises(DataError, match="have ended"):
        data.train.batch(torch.tensor([0]))


def test_a_worker_that_raises_or_is_killed_is_one_line() -> None:
    data = of_workers(2, raises=7)
    with data_workers(data), pytest.raises(OwnCodeError) as caught:
        list(batches_of(data))
    assert "train[7] raised ValueError: nothing there" in str(caught.value)
    assert "in __getitem__" in caught.value.traceback
    assert "firecaffe/training/" not in caught.value.traceback
    data = of_workers(1, ends=7)
    with data_workers(data), pytest.raises(WorkerKilledError) as killed:
        list(batches_of(data))
    assert all(part in str(killed.value) for part in ("train", "SIGKILL", "7", "workers=0"))


def test_one_that_the_kernel_kills_for_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_workers_module, "oom_kill_count", count(4).__next__)
    data = of_workers(1, ends=7)
    with data_workers(data), pytest.raises(MemoryFullError, match=r"train.*memory"):
        list(batches_of(data))


@pytest.fixture
def own_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """Lets data workers come from a new server, which runs some code as it loads."""
    server = forkserver.ForkServer()

    def loads(code: str) -> None:
        (tmp_path / "loaded_first.py").write_text(f"import os, signal\n{code}")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
        monkeypatch.setattr(data_workers_module, "PRELOADED", "loaded_first")
        for name in ("connect_to_new_process", "set_forkserver_preload"):
            monkeypatch.setattr(forkserver, name, getattr(server, name))

    yield loads
    server._stop()  # type: ignore[attr-defined]


def test_their_server_ends_by_no_signal_that_all_processes_get(
    own_server: Callable[[str], None],
) -> None:
    """As of Ctrl-C, while it loads."""
    numbers = [int(number) for number in data_workers_module.IGNORED]
    own_server(f"for number in {numbers}:\n    os.kill(os.getpid(), number)\n")
    data = of_workers(1)
    with data_workers(data):
        assert len(list(batches_of(data))) > 1


def test_their_server_is_killed(own_server: Callable[[str], None]) -> None:
    own_server("os.kill(os.getpid(), signal.SIGKILL)")
    data = of_workers(1)
    with data_workers(data), pytest.raises(WorkerKilledError, match=r"train.*killed"):
        list(batches_of(data))


def test_one_that_waits_for_ever_does_not_keep_the_training_from_ending() -> None:
    data = of_workers(1, waits=int(SampleOrder(4, 9, 6, 2).micro_batch(1, 0)[0]))
    batches = Batches(data.train, SampleOrder(4, 9, 6, 2), DataConfig())
    ahead = PrefetchedBatches(batches, range(3), 0, 9)
    with data_workers(data):
        ahead.train_batch(0, 0)
    ahead.close()


def test_what_cannot_be_sent_to_a_worker_is_said_before_the_training() -> None:
    dataset = Drawn()
    vars(dataset)["lock"] = threading.Lock()
    with pytest.raises(DataError, match=r"train_set cannot be sent to data workers.*lock"):
        check_own("train_set", from_torch(dataset, workers=1))
    check_own("train_set", from_torch(dataset))


def test_classes_and_functions_that_no_process_could_import_are_sent() -> None:
    """As those of a script or a notebook."""

    class Local(Drawn):
        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(index)[0]["drawn"], index

    def collate(items: list[Any]) -> Any:
        return torch.stack([item for item, _ in items]), ()

    by_main = type("OfMain", (Local,), {"__module__": "__main__"})
    for kind in (Local, by_main):
        alone, apart = (check_own("train", from_torch(kind(), n, collate)) for n in (0, 1))
        data = divide(DataParts(apart, apart), DataConfig())
        samples = torch.arange(COUNT)
        with data_workers(data):
            assert same_bits(apart.batch(samples), alone.batch(samples))


def rank_with_workers(pipe: Connection) -> None:
    data = of_workers(2)
    with data_workers(data):
        pipe.send(makers_of(batches_of(data)))
        threading.Event().wait()


def test_they_end_with_a_rank_that_is_killed() -> None:
    context = multiprocessing.get_context("forkserver")
    own, other = context.Pipe()
    rank = context.Process(target=rank_with_workers, args=(other,))
    rank.start()
    workers = [psutil.Process(number) for number in own.recv()]
    assert workers
    rank.kill()
    rank.join()
    _, left = psutil.wait_procs(workers, timeout=300)
    assert not left
