"""Whose a file is: by folders, not by what stands in its path."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import firecaffe
from firecaffe import errors
from firecaffe.errors import Owner, whose

PACKAGE = Path(firecaffe.__path__[0])


@pytest.mark.parametrize(
    ("file", "owner"),
    [
        (errors.__file__, "firecaffe"),
        (str(PACKAGE / "cli" / ".." / "errors.py"), "firecaffe"),
        (json.__file__, "library"),
        (torch.nn.__file__, "library"),
        (pytest.__file__, "library"),
        ("<frozen importlib._bootstrap>", "library"),
        # Beside the package, in a clone that may be named firecaffe as well.
        (str(PACKAGE.parent / "examples" / "net.py"), "user"),
        (f"{PACKAGE}_of_mine/net.py", "user"),
        ("/home/someone/firecaffe/net.py", "user"),
        ("/home/someone/site-packages/project/net.py", "user"),
        ("/home/someone/dist-packages/net.py", "user"),
        (f"{Path(json.__file__).parent.parent}_of_mine/net.py", "user"),
    ],
)
def test_a_file_is_of_the_folder_that_it_is_in(file: str, owner: Owner) -> None:
    assert whose(file) == owner


def test_a_folder_of_libraries_that_python_looks_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "site-packages"
    assert whose(str(folder / "library" / "net.py")) == "user"
    monkeypatch.syspath_prepend(folder)
    assert whose(str(folder / "library" / "net.py")) == "library"


def test_links_and_relative_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(PACKAGE)
    assert whose(str(tmp_path / "link" / "errors.py")) == "firecaffe"
    monkeypatch.chdir(PACKAGE.parent)
    assert whose(os.path.join("firecaffe", "errors.py")) == "firecaffe"
    assert whose(os.path.join("examples", "net.py")) == "user"
    # An installer may keep a library elsewhere, and link to it.
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "kept.py").touch()
    (tmp_path / "site-packages" / "library.py").symlink_to(tmp_path / "kept.py")
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    assert whose(str(tmp_path / "site-packages" / "library.py")) == "library"


def test_a_folder_of_its_name_where_python_starts_hides_no_package(tmp_path: Path) -> None:
    """As `git clone` makes it: Python would take the clone for a package without files."""
    (tmp_path / "firecaffe").mkdir()
    program = [sys.executable, "-c", "import firecaffe.errors"]
    subprocess.run(program, cwd=tmp_path, check=True)
