"""firecaffe.launch: a function of a script's `__main__`, or of a notebook, on workers of this host.

A script is typed once, and launches as often as there is something to see.
"""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.tracebacks import owners
from tests.typed import TIMEOUT_S, Typed, python

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"

# No `if __name__ == "__main__"`: it is not needed, for no worker runs the script again.
BEGINNING = """
import json, logging, os, random, signal, sys, threading
import torch
from torch import nn
import firecaffe

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 2))

class Answer:
    def __init__(self, *found):
        self.found = found

RECIPE = firecaffe.Recipe(
    train=firecaffe.TrainConfig(global_batch_size=16, micro_batch_size=4, steps=3),
    run=firecaffe.RunConfig(tensorboard=False),
)

def data(number):
    images = torch.arange(number * 64).reshape(number, 1, 8, 8) % 251
    return firecaffe.TensorDataset(images.to(torch.uint8), torch.arange(number) % 2, num_classes=2)

def train(*more):
    return firecaffe.train(RECIPE, Net, data(64), data(32), *more)
"""

RETURNS = """
def twice(word):
    first, second = train(), train()
    assert first.weights_sha256 == second.weights_sha256
    return Answer(word, os.environ["WORLD_SIZE"], first.weights_sha256)

def fails_once(marker):
    if not os.path.exists(marker):
        open(marker, "w").close()
        raise KeyError("once")
    return "again"

assert firecaffe.launch(fails_once, 1, args=(os.path.abspath("marker"),), max_restarts=1) == "again"
logging.disable(logging.DEBUG)
before = signal.getsignal(signal.SIGTERM), dict(os.environ), random.getstate()
answers = [firecaffe.launch(twice, count, kwargs={"word": "word"}) for count in (1, 2)]
assert (signal.getsignal(signal.SIGTERM), dict(os.environ), random.getstate()) == before
assert logging.root.manager.disable == logging.DEBUG
torch.set_default_dtype(torch.float64)
assert firecaffe.launch(torch.get_default_dtype, 1) == torch.float64
torch.set_default_dtype(torch.float32)
assert all(type(answer) is Answer for answer in answers)
print(json.dumps([answer.found for answer in answers]))
"""

FAILS = """
def one_fails():
    if os.environ["RANK"] == "1":
        raise KeyError("of one")
    torch.distributed.init_process_group("gloo")

def all_fail():
    raise ValueError("of all")

def loss_fails():
    def loss(outputs, labels):
        raise ZeroDivisionError("of the loss")
    return train(loss)

class Late(Net):
    calls = 0
    def forward(self, images):
        Late.calls += 1
        if os.environ["RANK"] == "1" and Late.calls > 8:  # in the third step
            os.environ["TESTS_WHOLE_END"] = "1"  # this rank's end takes longer than the other's
            raise KeyError("of forward") from IndexError("of a sample")
        return super().forward(images)

def one_fails_in_training():
    return firecaffe.train(RECIPE, Late, data(64), data(32))

def ends():
    sys.exit(9 if os.environ["RANK"] == "1" else 0)

def is_killed():
    os.kill(os.getpid(), signal.SIGKILL)

def returns_a_lock():
    return threading.Lock()

def told(function, *args, **options):
    try:
        firecaffe.launch(function, *args, **options)
    except firecaffe.FirecaffeError as error:
        notes = "".join(getattr(error, "__notes__", []))
        return [str(error), error.exit_code, notes]

wrong = firecaffe.Recipe(train=firecaffe.TrainConfig(global_batch_size=16, micro_batch_size=5))
print(json.dumps({
    "one fails": told(one_fails, 2),
    "all fail": told(all_fail, 2),
    "own loss": told(loss_fails, 2),
    "in training": told(one_fails_in_training, 2),
    "recipe": told(lambda: firecaffe.train(wrong, Net, data(64), data(32)), 2),
    "ends": told(ends, 2),
    "killed": told(is_killed, 1),
    "returned": told(returns_a_lock, 1),
    "function": told(3, 2),
    "number": told(train, 0),
    "argument": told(train, 1, args=(threading.Lock(),)),
    "in a rank": told(lambda: firecaffe.launch(train, 2), 1),
}))
"""

LETS_THROUGH = """
def fails():
    raise KeyError("mine")

firecaffe.launch(fails, 2)
"""

WAITS = """
import time

class Group:
    def __del__(self):
        threading.Event().wait()  # as for a rank that never comes

def waits():
    group = Group()
    print("ready", os.getpid(), flush=True)
    time.sleep(1000)

firecaffe.launch(waits, 2)
"""


def run(tmp_path: Path, code: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(BEGINNING + code)
    return python(script, cwd=tmp_path)


def test_a_function_of_the_script_returns_what_rank_0_does(tmp_path: Path) -> None:
    done = run(tmp_path, RETURNS)
    assert done.returncode == 0, done.stderr
    one, two = json.loads(done.stdout.splitlines()[-1])
    assert one[:2] == ["word", "1"]
    assert two[:2] == ["word", "2"]
    assert one[2] == two[2]
    assert re.search("fails_once raised KeyError: 'once'; restart 1 of 1\nTraceback", done.stderr)
    # Two trainings in each launch, told by the launcher with their folders.
    assert len(set(re.findall(r"run folder: (.+)", done.stderr))) == 4


def test_what_goes_wrong_is_one_line_with_its_rank_and_its_code(tmp_path: Path) -> None:
    done = run(tmp_path, FAILS)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert all("\n" not in line for line, _, _ in found.values())
    expected: dict[str, tuple[int, list[str], str]] = {
        "one fails": (1, ["rank 1", "one_fails", "KeyError", "of one"], "in one_fails"),
        "all fail": (1, ["rank", "all_fail", "ValueError", "of all"], "in all_fail"),
        "own loss": (2, ["rank", "ZeroDivisionError", "of the loss"], "in loss"),
        "in training": (1, ["rank 1", "KeyError", "of forward"], "IndexError: of a sample"),
        "recipe": (2, ["rank", "train.micro_batch_size"], ""),
        "ends": (9, ["rank 1", "ends", "9"], ""),
        "killed": (10, ["rank 0", "SIGKILL", "start it again"], ""),
        "returned": (2, ["rank 0", "returns_a_lock", "lock"], ""),
        "function": (2, ["function is 3"], ""),
        "number": (2, ["nproc_per_node is 0"], ""),
        "argument": (2, ["train", "lock"], ""),
        "in a rank": (2, ["rank 0", "torchrun"], ""),
    }
    assert found.keys() == expected.keys()
    for what, (code, words, of_traceback) in expected.items():
        line, exit_code, notes = found[what]
        assert exit_code == code, what
        assert all(word in line for word in words), line
        assert bool(notes) == bool(of_traceback), (what, notes)
        assert of_traceback in notes
        assert notes.count("Traceback") == bool(of_traceback)
        assert "firecaffe" not in owners(notes), "the traceback is of the user's code"
    assert "Traceback" not in done.stderr


def test_an_error_that_the_script_lets_through_is_its_end(tmp_path: Path) -> None:
    done = run(tmp_path, LETS_THROUGH)
    assert done.returncode == 1
    line, first, *rest = done.stderr.splitlines()
    assert re.match(r"firecaffe: rank [01]: fails raised KeyError: 'mine'", line)
    assert first.startswith("Traceback")
    assert done.stderr.count("Traceback") == 1, "of two workers that fail alike, one is told"
    assert 'raise KeyError("mine")' in "".join(rest)
    assert "firecaffe" not in owners(done.stderr), "the traceback is of the user's code"


def test_ctrl_c_leaves_no_worker(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(BEGINNING + WAITS)
    with Typed(script, cwd=tmp_path) as process:
        workers = []
        for line in process.stdout:
            workers += [psutil.Process(int(pid)) for pid in re.findall(r"ready (\d+)", line)]
            if len(workers) == 2:
                break
        psutil.Process(process.pid).send_signal(signal.SIGINT)
        assert process.wait() == 130
        _, errors = process.communicate()
        assert errors.splitlines()[-1].startswith("firecaffe: ended by SIGINT")
        assert not any(worker.is_running() for worker in workers)


def test_ctrl_c_while_a_worker_loads_torch_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    command = [sys.executable, "-m", "firecaffe.script.launched_worker", str(tmp_path)]
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        command, env=environment, capture_output=True, timeout=TIMEOUT_S, check=False
    )
    assert (done.returncode, done.stderr) == (-signal.SIGINT, b"")


@pytest.mark.slow
def test_a_notebook_trains_on_two_workers(tmp_path: Path) -> None:
    """In a real kernel: its main thread runs an event loop, its standard output is not a file."""
    pytest.importorskip(
        "nbclient", reason="nbclient and ipykernel run notebooks: pip install -e '.[dev]'"
    )
    pytest.importorskip("ipykernel")
    execute = """
import sys, nbformat, nbclient
notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
for cell in notebook.cells:
    for output in cell.get("outputs", []):
        print(output.get("text", ""), end="")
"""
    done = subprocess.run(
        [sys.executable, "-c", execute, str(NOTEBOOK)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "the same bits: True" in done.stdout
