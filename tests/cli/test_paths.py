"""Paths in a recipe: from the current folder as they are typed, from the root in a run's own."""

import json
import shutil
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from firecaffe.cli import main
from firecaffe.recipe.identity import identity
from firecaffe.recipe.recorded_recipe import recipe_of
from firecaffe.runs.run_table import differing_words, other_work, read_run
from tests.typed import firecaffe

CODE = """
import torch, firecaffe

class Net(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Linear(3, 2))

def data():
    inputs, targets = torch.eye(3), torch.tensor([0, 1, 1])
    return (inputs, targets), (inputs, targets)

def task():
    return firecaffe.Task(torch.nn.functional.cross_entropy)

class Slow(torch.optim.SGD):
    pass
"""

RECIPE = """
model = { name = "code/of_mine.py:Net", weights = "first.pt" }
data.name = "code/of_mine.py:data"
task.name = "code/of_mine.py:task"
solver.type = "code/of_mine.py:Slow"
train = { global_batch_size = 3, micro_batch_size = 3, steps = 1, device = "cpu" }
run = { folder = "run", tensorboard = false }
"""


def test_a_run_is_used_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home, other = tmp_path / "home", tmp_path / "other"
    for folder in (home / "code", other):
        folder.mkdir(parents=True)
    (home / "code" / "of_mine.py").write_text(CODE)
    (home / "recipe.toml").write_text(RECIPE)
    torch.save(torch.nn.Sequential(torch.nn.Linear(3, 2)).state_dict(), home / "first.pt")
    firecaffe("train", "recipe.toml", cwd=home).check_returncode()
    run = home / "run"
    own = json.loads((run / "result.json").read_text())
    words = tomllib.loads((run / "recipe.toml").read_text())
    assert words["model"]["name"] == f"{home / 'code' / 'of_mine.py'}:Net"
    assert own["model"] == "of_mine.py:Net"

    monkeypatch.chdir(other)
    capsys.readouterr()
    assert main(["evaluate", str(run), "--json", "--trust-code"]) == 0
    assert json.loads(capsys.readouterr().out)["loss"] == own["test_loss"]
    # A run goes on from its own recipe, and from the one that was typed after all has been moved.
    more = ["--train.steps", "2", "--resume"]
    of_run = run / "recipe.toml", "--run.folder", "a", *more, run
    firecaffe("train", *of_run, cwd=other).check_returncode()
    shutil.move(home, tmp_path / "moved")
    monkeypatch.chdir(tmp_path / "moved")
    of_mine = "recipe.toml", "--run.folder", "b", *more, "run"
    firecaffe("train", *of_mine, cwd=tmp_path / "moved").check_returncode()
    monkeypatch.delitem(sys.modules, "of_mine")
    folders = [Path("b"), other / "a"]
    runs = [read_run(folder) for folder in folders]
    assert (differing_words(runs), other_work(*runs)) == ({}, [])
    deciding = [identity(recipe_of(folder), 2) | {"model.weights": ""} for folder in folders]
    assert deciding[0] == deciding[1]
