"""How long a recipe trains: steps or epochs, in its file or typed."""

from pathlib import Path

import pytest

from firecaffe.errors import RecipeError
from tests.unit.recipe.test_sections import parsed


@pytest.mark.parametrize(("word", "other"), [("steps", "epochs"), ("epochs", "steps")])
def test_a_typed_length_takes_the_place_of_the_file_s(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], word: str, other: str
) -> None:
    """`--train.epochs 5` over a file with `steps` had no effect."""
    path = tmp_path / "recipe.toml"
    path.write_text(f"[train]\n{other} = 70\n")
    train = parsed(path, f"--train.{word}", "5").train
    assert (getattr(train, word), getattr(train, other)) == (5, 0)
    (line,) = capsys.readouterr().err.splitlines()
    assert all(part in line for part in (f"train.{word} 5", f"train.{other} 70", str(path)))
    assert getattr(parsed(path, f"--train.{word}", "0").train, other) == 70
    assert getattr(parsed(path, f"--train.{other}", "6").train, other) == 6
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("steps = 5\nepochs = 1", []),
        ("", ["--train.steps", "5", "--train.epochs", "1"]),
        ("steps = 5", ["--train.steps", "6", "--train.epochs", "1"]),
    ],
)
def test_two_lengths_of_one_source_are_refused(
    tmp_path: Path, text: str, options: list[str]
) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(f"[train]\n{text}\n")
    with pytest.raises(RecipeError, match=r"train\.steps = [56] with train\.epochs = 1"):
        parsed(path, *options)


def test_no_length_is_one_epoch_unless_it_was_typed(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text("[train]\nseed = 1\n")
    assert parsed(path).train.num_steps(7) == 7
    with pytest.raises(RecipeError, match=r"train\.epochs is 0; it must be at least 1"):
        parsed(path, "--train.epochs", "0")
