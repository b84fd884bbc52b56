"""The owner of a file of code: firecaffe, Python or a library, or the user."""

import os
import site
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

Owner = Literal["firecaffe", "library", "user"]

PACKAGE = Path(__file__).parent
"""This package's folder. The clone around it, perhaps of the same name, holds user code."""

LIBRARIES = ("site-packages", "dist-packages")


def whose(file: str) -> Owner:
    """Return the owner of a file named by a traceback's frame; code without a file is Python's.

    Only folders that Python searches are a library's. Links are compared both followed and not.
    """
    if file.startswith("<"):
        return "library"
    if _is_in(file, [PACKAGE]):
        return "firecaffe"
    return "library" if _is_in(file, _folders_of_libraries()) else "user"


def _folders_of_libraries() -> list[Path]:
    paths = sysconfig.get_paths()
    return [
        *(Path(paths[name]) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        *map(Path, [*site.getsitepackages(), site.getusersitepackages()]),
        # A user's project may lie in a folder of such a name, too: only those on the path count.
        *(path for path in map(Path, sys.path) if path.name in LIBRARIES),
    ]


def _is_in(file: str, folders: Iterable[Path]) -> bool:
    files = _names(file)
    names = [name for folder in folders for name in _names(folder)]
    return any(path.is_relative_to(name) for path in files for name in names)


def _names(path: str | Path) -> set[Path]:
    return {Path(os.path.abspath(path)), Path(os.path.realpath(path))}
