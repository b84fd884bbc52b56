"""What a command line says, in whatever order and spelling, and beside a recipe's file."""

from pathlib import Path

import pytest

from firecaffe.cli.arguments import Parser, suggest_setting
from firecaffe.cli.compare import make_parser as of_compare
from firecaffe.cli.plan import make_parser as of_plan
from firecaffe.cli.train import make_parser as of_train
from firecaffe.cli.tune import make_parser as of_tune
from firecaffe.cli.typed_recipe import parse_recipe
from firecaffe.errors import RecipeError


@pytest.mark.parametrize(
    "argv",
    [
        ["r.toml", "--nproc-per-node", "2", "--train.global_batch_size", "8"],
        ["--nproc_per_node", "2", "--train.global-batch-size", "8", "r.toml"],
        ["--nproc-per-node=2", "r.toml", "--train.global_batch_size=8"],
    ],
)
def test_a_recipe_and_its_options_stand_in_any_order(argv: list[str]) -> None:
    line = of_train().read(argv)
    assert line.positionals == ["r.toml"]
    assert line.options == ["--nproc-per-node=2", "--train.global_batch_size=8"]
    assert line.words == ["train.global_batch_size"]


@pytest.mark.parametrize(
    ("parser", "argv", "positionals", "options"),
    [
        (of_train(), ["--solver.base_lr", "-1e5", "r"], ["r"], ["--solver.base_lr=-1e5"]),
        (of_train(), ["--print_config", "r"], ["r"], ["--print-config"]),
        (of_train(), ["--solver.lr_mult.a_b-c", "2"], [], ["--solver.lr_mult.a_b-c=2"]),
        (of_plan(), ["--compare", "a", "b", "c"], ["c"], ["--compare", "a", "b"]),
        (
            of_tune(),
            ["r", "--against", "a", "b", "--json"],
            ["r"],
            ["--against", "a", "b", "--json"],
        ),
        (of_compare(), ["a", "--by", "recipe", "b"], ["a", "b"], ["--by=recipe"]),
    ],
)
def test_values_stay_with_their_option(
    parser: Parser, argv: list[str], positionals: list[str], options: list[str]
) -> None:
    line = parser.read(argv)
    assert (line.positionals, line.options) == (positionals, options)


def test_a_command_without_a_recipe_has_no_words() -> None:
    with pytest.raises(RecipeError, match=r"compare has no option --train\.steps"):
        of_compare().read(["a", "--train.steps", "3"])


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("--nproc", "--nproc-per-node"),
        ("--resum", "--resume or --resumed"),
        ("train.base_lr", "solver.base_lr"),
        ("--base-lr", "solver.base_lr"),
        ("--rezume", "--resume"),
        ("--zzz", ""),
    ],
)
def test_suggestions(name: str, found: str) -> None:
    known = ["--nproc-per-node", "--resume", "--resumed", "solver.base_lr", "train.steps"]
    assert suggest_setting(name, known) == (f"; did you mean {found}?" if found else "")


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
    recipe, _ = parse_recipe(of_train(), [str(path), *typed])
    assert recipe.solver.weight_decay == 0.1
    lines = capsys.readouterr().err.splitlines()
    assert [f"takes {kept}, as {path} has it for {before};" in line for line in lines] == (
        [True] if kept else []
    )
