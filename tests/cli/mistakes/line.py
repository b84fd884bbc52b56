"""A small recipe, a run of it, and the one line that a mistake is told in."""

from functools import cache, partial
from pathlib import Path

import pytest

from firecaffe.cli import main
from firecaffe.data.generated import generate

GOOD = """
[model]
name = "lenet"
[data]
name = "generated"
[train]
global_batch_size = 8
micro_batch_size = 2
steps = 1
"""

generate_once = cache(partial(generate, 0, 1000, 100))
"""Made once, and few: most of the commands here would make all of them anew."""


def error_of(capsys: pytest.CaptureFixture[str], words: list[str]) -> tuple[int, str]:
    """The exit code and the one line on stderr, if nothing else was said."""
    capsys.readouterr()
    code = main(words)
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("firecaffe: ")
    return code, line


def train_here(folder: Path, *words: str) -> Path:
    """Trains the good recipe in this process: by torchrun's variables it is the one rank."""
    (folder / "good.toml").write_text(GOOD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("firecaffe.data.sources.generate", generate_once)
        patch.setenv("RANK", "0")
        patch.setenv("WORLD_SIZE", "1")
        run = [f"--run.folder={folder}/run", "--run.tensorboard=false"]
        assert main(["train", f"{folder}/good.toml", *run, *words]) == 0
    return folder / "run"
