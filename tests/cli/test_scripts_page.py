"""Each block of docs/scripts.md is a whole script, and so are those of getting started together."""

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


def test_getting_started_is_one_script(tmp_path: Path) -> None:
    code = "\n".join(snippets("docs/getting-started.md"))
    script = tmp_path / "script.py"
    script.write_text(f"{code}\nassert result.metrics['mean_iou'] > 0.5, result.metrics\n")
    done = python(script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "mean_iou" in done.stdout
