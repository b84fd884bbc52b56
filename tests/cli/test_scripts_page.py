"""Each block of docs/scripts.md is a whole script, and is run as one."""

import re
from pathlib import Path

import pytest

from tests.cli.shown_commands import snippets
from tests.typed import python

EXTRAS = ("accelerate", "lightning", "transformers")


SCRIPTS = snippets("docs/scripts.md")


@pytest.mark.parametrize("number", range(len(SCRIPTS)))
def test_a_block_runs_as_it_stands(number: int, tmp_path: Path) -> None:
    code = SCRIPTS[number]
    for package in set(re.findall(r"^(?:import|from) (\w+)", code, re.M)) & set(EXTRAS):
        pytest.importorskip(package, reason=f"needs {package}: pip install -e '.[dev]'")
    script = tmp_path / "script.py"
    script.write_text(code)
    done = python(script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
