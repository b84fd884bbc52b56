"""The repository's own rules: short files, plain names, a README that ends in the whole tree."""

import re
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


def tree_of_readme() -> dict[str, str]:
    """Path -> what the README's tree says of it."""
    block = (ROOT / "README.md").read_text().split("## The tree")[1].split("```")[1]
    entries: dict[str, str] = {}
    folders: list[str] = []
    for line in block.splitlines()[1:]:
        match = re.match(r"^( *)(\S+)(?: +(.*))?$", line)
        if not match:
            continue
        depth = len(match[1]) // 2
        folders = [*folders[:depth], match[2]]
        entries["".join(folders)] = match[3] or ""
    return entries


def test_the_readme_ends_in_the_tree() -> None:
    entries = tree_of_readme()
    package = {str(p) for p in FILES if p.parts[0] == "firecaffe" and p.suffix == ".py"}
    assert {path for path in entries if path.startswith("firecaffe/") and path.endswith(".py")} == {
        path for path in package if not path.endswith("__init__.py")
    }
    for path, line in entries.items():
        assert (ROOT / path).exists(), path
        assert line, f"{path} has no line"
    top = {p.parts[0] + ("/" if len(p.parts) > 1 else "") for p in FILES} - {".gitignore"}
    assert top <= set(entries)
