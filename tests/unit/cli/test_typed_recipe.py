"""What of a recipe's file holds beside what is typed, and that it is checked once."""

from pathlib import Path
from typing import Any

import pytest

from firecaffe.cli import main, start_training, train
from firecaffe.cli.train import make_parser
from firecaffe.cli.typed_recipe import parse_recipe
from firecaffe.recipe import checked_recipe, refusals
from firecaffe.recipe.checked_recipe import Prepared

FILE = """
[solver]
type = "sgd"
momentum = 0.9
weight_decay = 0.1
lr_policy = "step"
gamma = 0.1
stepsize = 100
"""

SMALL = """
[model]
name = "lenet"
[data]
name = "generated"
[train]
steps = 1
global_batch_size = 8
micro_batch_size = 4
device = "cpu"
"""


@pytest.mark.parametrize(
    ("typed", "kept", "before"),
    [
        ("--solver.lr_policy inv", "solver.gamma 0.1", "step"),
        ("--solver.lr_policy sigmoid", "solver.gamma 0.1, solver.stepsize 100", "step"),
        ("--solver.lr_policy=sigmoid --solver.gamma=-1", "solver.stepsize 100", "step"),
        ("--solver.type adam", "solver.momentum 0.9", "sgd"),
        ("--solver.lr_policy inv --solver.gamma 1e-4", "", ""),
        ("--solver.lr_policy step", "", ""),
        ("--solver.lr_policy cosine", "", ""),
        ("--solver.gamma 0.5", "", ""),
    ],
)
def test_a_formula_that_takes_what_the_file_has_for_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], typed: str, kept: str, before: str
) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(FILE)
    recipe, _ = parse_recipe(make_parser(), [str(path), *typed.split()])
    assert recipe.solver.weight_decay == 0.1
    lines = capsys.readouterr().err.splitlines()
    said = [f"takes {kept}, as {path} has it for {before};" in line for line in lines]
    assert said == ([True] if kept else [])


def test_a_recipe_is_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ranks get what was checked."""
    path, checks, given = tmp_path / "recipe.toml", [], {}
    path.write_text(f'{SMALL}\n[run]\nfolder = "{tmp_path}/run"\n')
    once = refusals.check_together

    def launch(argv: list[str], *_: Any, **words: Any) -> list[Path]:
        given.update(words)
        monkeypatch.setattr(train, "handed", lambda: given["for_ranks"])
        assert main(["train", "what ranks do not read"]) == 0
        return [tmp_path / "run"]

    def check_together(*args: Any, **words: Any) -> None:
        checks.append(args)
        once(*args, **words)

    monkeypatch.setattr(checked_recipe, "check_together", check_together)
    monkeypatch.setattr(start_training, "launch", launch)
    assert main(["train", str(path), "--train.seed", "3"]) == 0
    assert isinstance(given["for_ranks"], Prepared)
    assert given["for_ranks"].recipe.train.seed == 3
    assert len(checks) == 1


def test_plugins_are_asked_for_every_number_of_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, asked = tmp_path / "recipe.toml", []
    path.write_text(SMALL)
    monkeypatch.setattr(start_training, "check_with", lambda _, ranks: asked.append(ranks))
    monkeypatch.setattr(start_training, "launch", lambda *_, **__: [])
    hosts = ["--nnodes", "1:2", "--rdzv-endpoint", "localhost:29400", "--nproc-per-node", "1"]
    assert main(["train", str(path), *hosts]) == 0
    assert asked == [2, 1]
