"""The repository's own rules: short files, plain names."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_LINES = 400
FORBIDDEN_NAMES = ("utils", "util", "helpers", "common", "misc")


def tracked() -> list[Path]:
    """The project's files: git's, or all that is no build product where there is no git."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [Path(line) for line in done.stdout.splitlines() if (ROOT / line).is_file()]


FILES = {path: (ROOT / path).read_text() for path in tracked() if path.suffix == ".py"}


def test_python_files_are_short_and_begin_by_saying_what_they_are_for() -> None:
    assert [str(path) for path, text in FILES.items() if text.count("\n") > MOST_LINES] == []
    assert [str(path) for path in FILES if path.stem in FORBIDDEN_NAMES] == []
    assert [str(p) for p, text in FILES.items() if text and not text.startswith('"""')] == []


def test_most_files_are_under_200_lines() -> None:
    lengths = [text.count("\n") for text in FILES.values()]
    assert sum(length < 200 for length in lengths) / len(lengths) > 0.75
