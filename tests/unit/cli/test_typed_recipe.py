"""What of a recipe's file holds beside what is typed, and what is said of it."""

from pathlib import Path

import pytest

from firecaffe.cli.train import make_parser
from firecaffe.cli.typed_recipe import parse_recipe

FILE = """
[solver]
type = "sgd"
momentum = 0.9
weight_decay = 0.1
lr_policy = "step"
gamma = 0.1
stepsize = 100
"""


@pytest.mark.parametrize(
    ("typed", "kept", "before"),
    [
        (["--solver.lr_policy", "inv"], "solver.gamma 0.1", "step"),
        (["--solver.lr_policy", "sigmoid"], "solver.gamma 0.1, solver.stepsize 100", "step"),
        (["--solver.lr_policy=sigmoid", "--solver.gamma=-1"], "solver.stepsize 100", "step"),
        (["--solver.type", "adam"], "solver.momentum 0.9", "sgd"),
        (["--solver.lr_policy", "inv", "--solver.gamma", "1e-4"], "", ""),
        (["--solver.lr_policy", "step"], "", ""),
        (["--solver.lr_policy", "cosine"], "", ""),
        (["--solver.gamma", "0.5"], "", ""),
    ],
    ids=" ".join,
)
def test_a_formula_that_takes_what_the_file_has_for_another(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    typed: list[str],
    kept: str,
    before: str,
) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(FILE)
    recipe, _ = parse_recipe(make_parser(), [str(path), *typed])
    assert recipe.solver.weight_decay == 0.1
    lines = capsys.readouterr().err.splitlines()
    assert [f"takes {kept}, as {path} has it for {before};" in line for line in lines] == (
        [True] if kept else []
    )
