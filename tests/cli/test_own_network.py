"""Commands that take a network without a recipe take a user's own; its arguments are TOML's."""

import json
import tomllib
from pathlib import Path

import pytest

from tests.tracebacks import owners
from tests.typed import firecaffe, refused, said_by
from tests.unit.models.own_nets import PLACE

NET = f"{PLACE}:Net"
LATER = "tests.unit.tasks.own:loss_fails_later"
ARGS = ["--args", "{ num_classes = 7, width = 6 }"]
PARAMETERS = 6 * (9 + 1) + 2 * 6 + 7 * (6 + 1)
"""Of the network with these arguments: convolution, normalization and head."""


def test_profile() -> None:
    words = ["profile", NET, *ARGS, "--input", "1x8x8", "--json"]
    found = json.loads(said_by(*words))
    assert found["parameters"] == PARAMETERS
    assert found["layers"][0]["output_shape"] == [1, 6, 8, 8]
    assert "--input" in refused(2, "profile", NET, *ARGS)
    assert "1x8x8" in refused(2, "profile", f"{PLACE}:Broken", *ARGS, "--input", "1x8x8")


@pytest.mark.parametrize("member", ["Net", "Reads"])
def test_plan(member: str) -> None:
    words = ["--args", "{ num_classes = 7 }", "--input", "1x8x8", "--workers", "1,2"]
    reference = f"{PLACE}:{member}"
    out = said_by("plan", "--model", reference, *words, "--exchanges", "tree", "--json")
    [plan] = json.loads(out)
    assert plan["parameter_bytes"] == 4 * (4 * 10 + 2 * 4 + 7 * 5)
    assert [row["workers"] for row in plan["rows"]] == [1, 2]


def test_a_table_on_the_command_line_is_tomls_or_jsons(tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text('[model]\nname = "lenet"\nargs = { width = 3 }\n')
    for words, args in (
        (["--model.args", "{ width = 4, deep.er = true }"], {"width": 4, "deep": {"er": True}}),
        (["--model.args", '{"width": 4}'], {"width": 4}),
        (["--model.args.depth", "2"], {"width": 3, "depth": 2}),
    ):
        out = said_by("train", str(recipe), "--print-config", *words)
        assert tomllib.loads(out)["model"]["args"] == args
    assert "model.args" in refused(2, "train", recipe, "--model.args", "3")


def test_a_list_on_the_command_line_needs_no_quotes(tmp_path: Path) -> None:
    """A shell takes them; and `[features.6]` alone is the head of a table in TOML."""
    recipe = tmp_path / "r.toml"
    recipe.write_text('[model]\nname = "lenet"\n')
    for typed, names in (
        ("[features.6]", ["features.6"]),
        ("[features.6, b]", ["features.6", "b"]),
        ('["features.6"]', ["features.6"]),
        ("['a', 'b.1']", ["a", "b.1"]),
        ("[]", []),
    ):
        out = said_by("train", str(recipe), "--print-config", "--parallel.stages", typed)
        assert tomllib.loads(out)["parallel"]["stages"] == names
    for typed in ("[a", "a", "[a b]", "{ a = 1 }"):
        words = ["train", str(recipe), "--print-config", "--parallel.stages", typed]
        assert "parallel.stages" in refused(2, *words)


def test_a_run_whose_network_was_given_in_python_says_what_to_do(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[model]\nname = "own Net"\n[data]\nname = "generated"\n')
    for command in ("train", "verify", "plan"):
        said = refused(2, command, recipe)
        assert "own Net" in said
        assert "path/file.py:function" in said
        assert said.count("\n") == 1


def test_what_own_code_raises_in_a_step_is_below_the_line(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[model]\nname = "lenet"\n[data]\nname = "generated"\n')
    run = ["--run.folder", str(tmp_path / "run"), "--run.tensorboard", "false"]
    done = firecaffe("train", recipe, "--task.name", LATER, *run)
    assert done.returncode == 1
    line, *rest = done.stderr.splitlines()
    assert line.startswith("firecaffe: rank 0")
    assert "failed" in line
    assert "LookupError: no such sample" in line
    assert rest[0].startswith("Traceback")
    assert rest[-1] == "LookupError: no such sample"
    assert "firecaffe" not in owners("\n".join(rest))
