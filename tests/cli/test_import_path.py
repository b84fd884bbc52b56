"""A file in the current folder is not imported for a library; a network of one's own there is.

Pythons start here as they do for users, which takes the time that loading torch takes.
"""

import subprocess
import sys
from pathlib import Path

from firecaffe.training.trial import command_of

NETWORK = """
from torch import nn


def make(num_classes, in_channels):
    return nn.Sequential(nn.Flatten(), nn.Linear(784 * in_channels, num_classes))
"""

RECIPE = """
[model]
name = "networks_of_mine:make"
[data]
name = "generated"
[train]
global_batch_size = 8
micro_batch_size = 4
steps = 1
eval_batch_size = 1000
[run]
folder = "run"
tensorboard = false
"""


def test_the_current_folder_comes_last_for_a_command_and_its_ranks(tmp_path: Path) -> None:
    """`python -m firecaffe` puts it first; the launcher's ranks are started so, too."""
    for name in ("random", "torch", "json", "numpy"):
        code = f"open('ran-{name}', 'w')\nraise SystemExit('{name}.py of this folder')\n"
        (tmp_path / f"{name}.py").write_text(code)
    (tmp_path / "networks_of_mine.py").write_text(NETWORK)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    words = [sys.executable, "-m", "firecaffe", "train", "recipe.toml", "--nproc-per-node", "2"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert not [each.name for each in tmp_path.glob("ran-*")]
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "result.json").is_file()


def test_a_search_starts_its_trainings_likewise() -> None:
    assert (
        "-P" in command_of(Path("recipe.toml"), 2)[: command_of(Path("recipe.toml"), 2).index("-m")]
    )
