"""The repository's own rules: short files, plain names."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_LINES = 400
FORBIDDEN_NAMES = ("utils", "util", "helpers", "common", "misc")


def tracked() -> list[Path]:
    """The project's files: git's, or all that is no build product where there is no git."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [Path(line) for line in done.stdout.splitlines() if (ROOT / line).is_file()]


FILES = tracked()


@pytest.mark.parametrize("path", [p for p in FILES if p.suffix == ".py"], ids=str)
def test_python_file(path: Path) -> None:
    text = (ROOT / path).read_text()
    assert len(text.splitlines()) <= MOST_LINES
    assert path.stem not in FORBIDDEN_NAMES
    assert text == "" or text.startswith('"""'), "a file begins by saying what it is for"


def test_most_files_are_under_200_lines() -> None:
    lengths = [len((ROOT / p).read_text().splitlines()) for p in FILES if p.suffix == ".py"]
    assert sum(length < 200 for length in lengths) / len(lengths) > 0.8
