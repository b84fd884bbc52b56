"""A user's code that is asked to stop: one line, and the code that schedulers know; that ends its
process with success in the middle of a run, which is a failure; and a script whose ranks srun,
mpirun or a shell has started: each says on its own stderr how it ends.
"""

import multiprocessing
import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import firecaffe
from firecaffe import CheckpointConfig, Recipe, Result, RunConfig, TrainConfig
from firecaffe.errors import PreemptedError
from firecaffe.faults import KINDS
from firecaffe.training.checkpoint import load_newest
from firecaffe.training.start import StopRequest
from tests.faults.runs import lines_of_ours, read
from tests.loopback import free_port
from tests.ranks.networks import Everything, small_data
from tests.typed import WHOLE_END, Typed, python

HEARS = """
import signal, sys
from tests.faults.test_own_script import train_and_hear
number = signal.Signals[sys.argv[2]]
if number == signal.SIGHUP:
    signal.signal(number, signal.SIG_IGN)  # as nohup has it
train_and_hear(sys.argv[1], number)
"""


class Hears(Everything):
    """A network whose process is sent a signal in training."""

    number = signal.SIGTERM

    def forward(self, images: Tensor) -> Tensor:
        if self.training and images.requires_grad is False and self.weights_have_moved():
            os.kill(os.getpid(), self.number)
            self.number = 0  # type: ignore[assignment]  # which asks nothing
        return super().forward(images)

    def weights_have_moved(self) -> bool:
        return bool(self.norm.num_batches_tracked and self.norm.num_batches_tracked > 6)


def train_and_hear(folder: str, number: signal.Signals) -> None:
    Hears.number = number
    recipe = Recipe(
        train=TrainConfig(global_batch_size=12, micro_batch_size=2, steps=9),
        run=RunConfig(folder=folder, tensorboard=False),
    )
    firecaffe.train(recipe, Hears, small_data(60), small_data(20, 1))


def test_a_script_that_is_asked_to_stop(tmp_path: Path) -> None:
    done = python("-c", HEARS, tmp_path / "run", "SIGTERM", environment={WHOLE_END: "1"})
    assert done.returncode == PreemptedError.exit_code == 75, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("firecaffe: ")
    assert "SIGTERM" in line
    assert f'resume with resume="{tmp_path / "run"}"' in line


def test_ctrl_c_saves_and_names_the_folder(tmp_path: Path) -> None:
    with pytest.raises(PreemptedError) as caught:
        train_and_hear(str(tmp_path / "run"), signal.SIGINT)
    assert "SIGINT" in str(caught.value)
    assert str(tmp_path / "run") in str(caught.value)
    step = load_newest(tmp_path / "run")[0].step
    assert 0 < step < 9
    assert f"step {step} " in str(caught.value)


def test_a_second_ctrl_c_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *to: sent.append(to))
    before = signal.getsignal(signal.SIGINT)
    with StopRequest() as request:
        signal.raise_signal(signal.SIGINT)
        assert (request.reason, sent) == ("SIGINT", [])
        signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    assert sent == [(os.getpid(), signal.SIGINT)]
    assert signal.getsignal(signal.SIGINT) == before


def test_a_second_ctrl_c_leaves_a_notebook_its_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    monkeypatch.setattr(os, "kill", lambda *_: pytest.fail("the kernel would end"))
    before = signal.getsignal(signal.SIGINT)
    with StopRequest():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == before


def test_a_closed_terminal_saves_unless_nohup_has_it_ignored(tmp_path: Path) -> None:
    with pytest.raises(PreemptedError, match="SIGHUP"):
        train_and_hear(str(tmp_path / "run"), signal.SIGHUP)
    assert 0 < load_newest(tmp_path / "run")[0].step < 9
    done = python("-c", HEARS, tmp_path / "ignored", "SIGHUP")
    assert done.returncode == 0, done.stderr
    assert load_newest(tmp_path / "ignored")[0].step == 9


NETWORK = """
import os, sys
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(784, 10), 0

    def forward(self, x):
        self.calls += self.training
        if self.calls > 8:  # five are before the first step
            END
        return self.layer(x.flatten(1))
"""

FOUR_SAMPLES = """
[model]
name = "net.py:Net"
[data]
name = "generated"
[train]
global_batch_size = 4
micro_batch_size = 4
steps = 12
eval_batch_size = 500
[run]
folder = "run"
tensorboard = false
"""


@pytest.mark.parametrize(("end", "said"), [("sys.exit()", "SystemExit"), ("os._exit(0)", "code 0")])
def test_no_success_is_told(tmp_path: Path, end: str, said: str) -> None:
    """Also when the restarts are used up."""
    (tmp_path / "net.py").write_text(NETWORK.replace("END", end))
    (tmp_path / "recipe.toml").write_text(FOUR_SAMPLES)
    words = ("-m", "firecaffe", "train", "recipe.toml", "--max-restarts", "1")
    done = python(*words, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    told = lines_of_ours(done.stderr)[-1]
    assert said in told
    assert "at step " in told
    fault = read(tmp_path / "run" / "fault.json")
    assert (fault["kind"], fault["then"]) == ("exception", "the run ended")


EXITS = """
import os, firecaffe
firecaffe.launch(lambda: os._exit(0), 1)
"""


def test_a_function_that_never_returns_is_told(tmp_path: Path) -> None:
    done = python("-c", EXITS, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    (line,) = done.stderr.splitlines()
    assert "ended its process, with code 0, before it returned" in line


SCRIPT = """
import os, signal, sys
import torch
from torch import nn
import firecaffe

case, folder = sys.argv[1:]
rank = int(os.environ["RANK"])
train = {"global_batch_size": 12, "micro_batch_size": 4, "steps": 3}
solver, run, more = {}, {"tensorboard": False, "folder": folder}, {}
images = torch.arange(24 * 16).reshape(24, 1, 4, 4) % 251
data = firecaffe.TensorDataset(images.to(torch.uint8), torch.arange(24) % 2, num_classes=2)
test = data

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(16, 2))

    def forward(self, images):
        if case == "killed" and rank == 1 and self.training:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(images)

def loss(outputs, labels):
    raise ValueError("of mine")

if case == "own code":
    more["loss"] = loss
if case == "recipe":
    train["micro_batch_size"] = 12
if case == "data":
    test = None
if case == "checkpoint":
    more["resume"] = "nowhere"
if case == "run":
    os.makedirs(folder, exist_ok=True)
if case == "agreement":
    solver["base_lr"] = 0.01 * (1 + rank)
if case == "not finite":
    solver["base_lr"] = 1e38
if case == "joined before":
    torch.distributed.init_process_group("gloo")
    train["micro_batch_size"] = 12
recipe = firecaffe.Recipe(
    train=firecaffe.TrainConfig(**train),
    solver=firecaffe.SolverConfig(**solver),
    run=firecaffe.RunConfig(**run),
    exchange=firecaffe.ExchangeConfig(silent_s=5),
)
firecaffe.train(recipe, Net, data, test, **more)
"""

CASES: dict[str, tuple[int, str]] = {
    "recipe": (2, "micro-batch"),
    "joined before": (2, "micro-batch"),
    "own code": (2, "of mine"),
    "data": (3, "train_set and test_set come together"),
    "checkpoint": (4, "nowhere"),
    "agreement": (5, "rank 1 differs"),
    "run": (8, "exists already"),
    "not finite": (18, "not finite"),
}
"""By what goes wrong: the exit code of both ranks, and what each says."""


def started(case: str, folder: Path) -> list[tuple[int, str]]:
    """The exit code and the stderr of two ranks, which are told what srun or a shell tells."""
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with ExitStack() as ends:
        ranks = [
            ends.enter_context(
                Typed("-c", SCRIPT, case, folder, environment={**world, "RANK": str(rank)})
            )
            for rank in range(2)
        ]
        return [(each.wait(), each.communicate()[1]) for each in ranks]


def lines_of(said: str, rank: int) -> list[str]:
    return [line for line in said.splitlines() if line.startswith(f"firecaffe: rank {rank}: ")]


@pytest.mark.parametrize("case", CASES)
def test_each_rank_says_in_one_line_what_ends_it(case: str, tmp_path: Path) -> None:
    code, words = CASES[case]
    for rank, (found, said) in enumerate(started(case, tmp_path / "run")):
        assert found == code, said
        (line,) = lines_of(said, rank)
        assert words in line
        assert said.count("Traceback") == (case == "own code"), said


def test_a_rank_that_is_killed_is_told_of_by_the_other(tmp_path: Path) -> None:
    (code, said), (killed, _) = started("killed", tmp_path / "run")
    assert killed == -signal.SIGKILL
    assert code == 9, said
    (line,) = lines_of(said, 0)
    assert f"rank 1 on {os.uname().nodename} went away" in line
    assert "resume" not in line, "there is no checkpoint yet"


LOSES = """
from pathlib import Path
import sys
from tests.faults.test_own_script import train_and_lose
print(train_and_lose(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])).state_sha256)
"""


class Loses(Dataset[tuple[Tensor, int]]):
    """A torch data set; if there is a mark, a data worker is killed as it makes its 30th sample."""

    def __init__(self, mark: Path) -> None:
        self.mark, self.made = mark, 0

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.made += multiprocessing.current_process().daemon  # only data workers are
        if self.made == 30 and self.mark.exists():
            self.mark.unlink(missing_ok=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.rand(6), index % 2


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.3), nn.Linear(4, 2))


def train_and_lose(folder: Path, workers: int, data_workers: int) -> Result:
    recipe = Recipe(
        train=TrainConfig(global_batch_size=6, micro_batch_size=3, epochs=4),
        checkpoint=CheckpointConfig(every=1),
        run=RunConfig(folder=str(folder), tensorboard=False),
    )
    data = firecaffe.from_torch(Loses(folder.with_suffix(".mark")), workers=data_workers)
    test = Loses(folder.with_suffix(".none"))
    return firecaffe.train(recipe, network, data, test, workers=workers, max_restarts=1)


def test_a_data_worker_that_is_killed_is_named_and_the_run_goes_on(tmp_path: Path) -> None:
    """To the bits of a run without data workers."""
    (mark := tmp_path / "run.mark").touch()
    done = python("-c", LOSES, tmp_path / "run", 2, 1)
    assert done.returncode == 0, done.stderr
    assert not mark.exists()
    fault = read(tmp_path / "run" / "fault.json")
    assert (fault["kind"], fault["exit_code"], fault["then"]) == (
        "worker_killed",
        KINDS["killed"].exit_code,
        "restart 1 of 1",
    )
    assert "SIGKILL" in fault["line"]
    alone = python("-c", LOSES, tmp_path / "alone", 1, 0)
    assert alone.stdout.splitlines()[-1] == done.stdout.splitlines()[-1]
