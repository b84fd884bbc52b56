"""The code of the lessons and of the how-to pages: it is run as it stands."""

import re
import shlex
from pathlib import Path

import pytest

from tests.cli.shown_commands import ROOT, snippets
from tests.typed import python

EXTRAS = ("accelerate", "lightning", "transformers")


PAGES = (
    "docs/howto/ddp_script.md",
    "docs/howto/lightning.md",
    "docs/howto/local_sgd.md",
    "docs/howto/split_a_network.md",
)
SCRIPTS = [
    pytest.param(code, id=f"{Path(page).stem}-{number}")
    for page in PAGES
    for number, code in enumerate(snippets(page))
]


@pytest.mark.parametrize("code", SCRIPTS)
def test_a_block_runs_as_it_stands(code: str, tmp_path: Path) -> None:
    for package in set(re.findall(r"^(?:import|from) (\w+)", code, re.M)) & set(EXTRAS):
        pytest.importorskip(package, reason=f"needs {package}: pip install -e '.[dev]'")
    script = tmp_path / "script.py"
    script.write_text(code)
    done = python(script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


LESSONS = {
    "docs/howto/arrays_to_predictions.md": "new-images.npy[3]  ",
    "docs/howto/learning_curve.md": "validation at step 4",
    "docs/howto/own_code.md": "lr 0.01",
    "docs/howto/resume.md": "going on after step 4",
    "docs/tutorials/notebook.md": "test at step 60",
    "docs/tutorials/own_network.md": "loss: the mean of the samples",
}
"""Pages that are run from top to bottom, with something that the last of their files says."""


@pytest.mark.parametrize("page", LESSONS)
def test_a_lesson_runs_from_top_to_bottom(page: str, tmp_path: Path) -> None:
    if "html=" in (ROOT / page).read_text("utf-8"):
        pytest.importorskip("matplotlib", reason="needs matplotlib: pip install -e '.[dev]'")
    said = _lesson(page, tmp_path)
    assert LESSONS[page] in said
    if page.endswith("own_network.md"):  # from Python and by a recipe
        assert len(set(re.findall(r"weights sha256 (\w+)", said))) == 1
        assert len(re.findall(r"weights sha256 (\w+)", said)) == 2


def _lesson(page: str, folder: Path) -> str:
    """Write the files of a page, and run its scripts and commands in order; return what they say.

    A file's first line is its name as a comment. Blocks of Python without one go on with the file
    before.
    """
    text = (ROOT / page).read_text("utf-8")
    files: dict[str, str] = {}
    steps: list[list[str]] = []
    name = "script.py"
    for language, code in re.findall(r"^```(python|toml|shell)\n(.*?)^```", text, re.M | re.S):
        if language == "shell":
            steps += [["-m", *shlex.split(line)] for line in code.splitlines()]
            continue
        if named := re.match(r"# ([\w.]+)\n", code):
            name = named[1]
        if name not in files and name.endswith(".py"):
            steps.append([name])
        files[name] = files.get(name, "") + code
    for name, code in files.items():
        (folder / name).write_text(code)
    said = ""
    for words in steps:
        done = python(*words, cwd=folder)
        assert done.returncode == 0, done.stderr
        said += done.stdout
    return said
