"""A script that trains and is asked to stop: one line, and the code that schedulers know."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch import Tensor

import firecaffe
from firecaffe import Recipe, RunConfig, SolverConfig, TrainConfig
from firecaffe.cluster import handover as report
from firecaffe.errors import CheckpointError, PeerLostError, PreemptedError, RecipeError
from firecaffe.faults import Fault
from firecaffe.training.checkpoint import load_newest
from firecaffe.training.stop import StopRequest
from tests.ranks.networks import Everything, small_data
from tests.typed import TIMEOUT_S, python

SCRIPT = """
import sys
from signal import SIGTERM
from tests.faults.test_own_script import train_and_hear
train_and_hear(sys.argv[1], SIGTERM)
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
    # A Python of its own: what its interpreter does at the end is what is tested.
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
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


IGNORES = """
import signal, sys
signal.signal(signal.SIGHUP, signal.SIG_IGN)
from tests.faults.test_own_script import train_and_hear
train_and_hear(sys.argv[1], signal.SIGHUP)
"""


def test_a_closed_terminal_saves_unless_nohup_has_it_ignored(tmp_path: Path) -> None:
    with pytest.raises(PreemptedError, match="SIGHUP"):
        train_and_hear(str(tmp_path / "run"), signal.SIGHUP)
    assert 0 < load_newest(tmp_path / "run")[0].step < 9
    done = python("-c", IGNORES, tmp_path / "ignored")
    assert done.returncode == 0, done.stderr
    assert load_newest(tmp_path / "ignored")[0].step == 9


def test_what_nobody_caught_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    others: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda _, error, __: others.append(error))
    report.tell_uncaught()
    report.tell_uncaught()  # once is enough
    ours, another = RecipeError("data.name is 'x'"), ValueError("the user's own")
    with pytest.raises(SystemExit) as ended:
        sys.excepthook(RecipeError, ours, None)
    assert ended.value.code == RecipeError.exit_code
    assert capsys.readouterr().err == "firecaffe: data.name is 'x'\n"
    sys.excepthook(ValueError, another, None)
    assert others == [another]
    lost = PeerLostError.of(Fault("killed", 1, "node-b", 4, "its launcher"))
    codes: list[int] = []
    monkeypatch.setattr(report, "end_process", codes.append)
    with pytest.raises(SystemExit):  # for the process has not ended here
        sys.excepthook(PeerLostError, lost, None)
    assert codes == [10]
    assert "rank 1 on node-b" in capsys.readouterr().err


def test_another_length_is_told_as_the_word_that_differs(tmp_path: Path) -> None:
    """And not as a fault of the disk, nor is a folder that is not there."""

    def recipe_of(steps: int) -> Recipe:
        return Recipe(
            train=TrainConfig(global_batch_size=12, micro_batch_size=4, steps=steps),
            solver=SolverConfig(lr_policy="cosine"),
            run=RunConfig(folder=str(tmp_path / f"run-{steps}"), tensorboard=False),
        )

    def told(steps: int, resume: Path) -> str:
        recipe = recipe_of(steps)
        with pytest.raises(CheckpointError) as caught:
            firecaffe.train(recipe, Everything, small_data(60), small_data(20, 1), resume=resume)
        assert caught.value.exit_code == 4
        return caught.value.last_word

    firecaffe.train(recipe_of(2), Everything, small_data(60), small_data(20, 1))
    line = told(3, tmp_path / "run-2")
    assert line.startswith("train.steps is 3 in the recipe, 2 in the checkpoint")
    assert "cosine" in line
    assert told(4, tmp_path / "nowhere") == f"{tmp_path / 'nowhere'}: no checkpoint there " + (
        "(a folder with SHA256SUMS)"
    )
