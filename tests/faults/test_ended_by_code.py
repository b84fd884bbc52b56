"""A user's code that ends its process with success, in the middle of a run: that is a failure."""

import json
from pathlib import Path

import pytest

from tests.typed import firecaffe, python

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

RECIPE = """
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


@pytest.mark.parametrize(
    ("end", "words"), [("sys.exit()", "SystemExit"), ("os._exit(0)", "code 0")]
)
def test_no_success_is_told(tmp_path: Path, end: str, words: str) -> None:
    """Also when the restarts are used up."""
    (tmp_path / "net.py").write_text(NETWORK.replace("END", end))
    (tmp_path / "recipe.toml").write_text(RECIPE)
    done = firecaffe("train", "recipe.toml", "--max-restarts", "1", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("firecaffe: ")]
    assert words in told[-1]
    assert "at step " in told[-1]
    fault = json.loads((tmp_path / "run" / "fault.json").read_text())
    assert (fault["kind"], fault["then"]) == ("exception", "the run ended")


SCRIPT = """
import os, firecaffe
firecaffe.launch(lambda: os._exit(0), 1)
"""


def test_a_function_that_never_returns_is_told(tmp_path: Path) -> None:
    done = python("-c", SCRIPT, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    (line,) = done.stderr.splitlines()
    assert "ended its process, with code 0, before it returned" in line
