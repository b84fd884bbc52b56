"""A terminal whose locale knows ASCII alone, and names that have more."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RECIPE = """
[model]
name = "lenet"  # für alle
[data]
name = "generated"
[train]
global_batch_size = 8
micro_batch_size = 4
steps = 1
eval_batch_size = 1000
[run]
folder = "Läufe/eins"
tensorboard = false
"""

ASCII_ALONE = {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.skipif(
    not sys.prefix.isascii(), reason="such a Python cannot start in a folder that is not ASCII"
)
def test_names_and_files_are_utf8_whatever_the_locale(tmp_path: Path) -> None:
    """A Python of its own, as the encoding is chosen when it starts."""
    here = tmp_path / "Größe"
    here.mkdir()
    (here / "für.toml").write_text(RECIPE, encoding="utf-8")
    command = [sys.executable, "-m", "firecaffe", "train", "für.toml"]
    environment = {**os.environ, **ASCII_ALONE}
    done = subprocess.run(command, cwd=here, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    done.stdout.decode("ascii")
    run = here / "Läufe" / "eins"
    assert "Läufe/eins" in (run / "recipe.toml").read_text(encoding="utf-8")
    assert json.loads((run / "result.json").read_text(encoding="utf-8"))["steps"] == 1
