"""docs/usage.md tells what the code has: every command, every exit code, every word of a recipe."""

import re
from pathlib import Path

from firecaffe import errors
from firecaffe.cli import COMMANDS, INTERRUPTED
from firecaffe.recipe.identity import flatten
from firecaffe.recipe.sections import Recipe

PAGE = (Path(__file__).parents[2] / "docs" / "usage.md").read_text()


def test_every_command_has_a_section() -> None:
    assert set(re.findall(r"^### `firecaffe (\w+)", PAGE, re.M)) == set(COMMANDS)


def test_every_exit_code_is_listed() -> None:
    classes = [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, errors.FirecaffeError)
    ]
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", PAGE, re.M)}
    assert {0, INTERRUPTED, *(c.exit_code for c in classes)} <= listed
    own = [c.exit_code for c in classes if "exit_code" in vars(c)]  # others have their parent's
    assert len(set(own)) == len(own)


def test_every_word_of_a_recipe_is_listed_with_its_default() -> None:
    section = PAGE.split("## The words of a recipe")[1].split("\n## ")[0]
    rows = dict(re.findall(r"^\| `([a-z_.]+\.\w+)` \| `?([^|`]*)`? \|", section, re.M))
    defaults = {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in flatten(Recipe()).items()
    }
    assert {name: value.strip() for name, value in rows.items()} == defaults
