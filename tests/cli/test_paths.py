"""Paths in a recipe, from the current folder or the root; names of files that are no UTF-8."""

import json
import os
import shutil
import sys
import tomllib
from itertools import product
from pathlib import Path

import pytest
import torch
from PIL import Image

from firecaffe.cli import main
from firecaffe.errors import RunError
from firecaffe.recipe.checked_recipe import recipe_of_run
from firecaffe.recipe.sections import identity
from firecaffe.runs.run_folder import read_run_file
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
    deciding = [identity(recipe_of_run(folder), 2) | {"model.weights": ""} for folder in folders]
    assert deciding[0] == deciding[1]


CAFE, TEA = b"caf\xe9", b"th\xe9"


def test_bytes_of_names_stay_in_a_run_and_in_all_that_is_made_of_it(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    root, folder = str(tmp_path / os.fsdecode(b"photos \xfc")), str(tmp_path / "run ß")
    for number, (part, name, place) in enumerate(product(("train", "test"), (CAFE, TEA), range(2))):
        path = Path(root, part, os.fsdecode(name), os.fsdecode(b"\xe4%d.png" % place))
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (28, 28), (20 * number, 7, 7)).save(path)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        '[model]\nname = "lenet"\n[data]\nname = "folder"\nresize = 28\n'
        "[train]\nglobal_batch_size = 4\nmicro_batch_size = 2\nsteps = 2\n"
    )
    words = ["--run.tensorboard", "false"]
    train = ["train", str(recipe), *words, "--data.path", root, "--run.folder", folder]
    firecaffe(*train).check_returncode()
    assert main([*train[:-1], str(tmp_path / os.fsdecode(b"run \xdf"))]) == RunError.exit_code
    assert b"run.folder" in capfdbinary.readouterr().err
    result = read_run_file(Path(folder), "result.json")
    assert list(map(os.fsencode, result["class_names"])) == [CAFE, TEA]

    predict = ["predict", folder, f"{root}/test", "--csv"]
    assert main([*predict, str(tmp_path / "table.csv")]) == 0
    written = (tmp_path / "table.csv").read_bytes()
    assert b"/photos \xfc/test/caf\xe9/\xe41.png,caf\xe9," in written.replace(TEA, CAFE)
    capfdbinary.readouterr()
    assert main([*predict, "-"]) == 0
    assert capfdbinary.readouterr().out == written

    packed, runs = str(tmp_path / "packed"), [folder, f"{folder}-packed"]
    assert main(["pack", root, packed]) == 0
    of_packed = ["--data.name", "packed", "--data.path", packed]
    more = "--resume", folder, "--train.steps", "3"
    firecaffe(*train[:-1], f"{folder}-more", *more).check_returncode()
    firecaffe(*train[:-1], f"{folder}-packed", *of_packed).check_returncode()
    for command in (
        ["pack", "--info", packed],
        ["evaluate", folder],
        ["explain", folder],
        ["export", folder, "--to", "safetensors"],
        ["predict", f"{folder}-packed", "--csv", "-"],
        ["compare", *runs, "--allow-unequal", "--html", str(tmp_path / "page.html")],
    ):
        assert main(command) == 0, command
    assert CAFE in capfdbinary.readouterr().out
    assert recipe.with_name("page.html").read_bytes()
