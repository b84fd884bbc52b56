"""Whose a file of code is: firecaffe's, Python's or a library's, or the user's."""

import os
import site
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

Owner = Literal["firecaffe", "library", "user"]

PACKAGE = Path(__file__).parent
"""This package's folder. The clone around it, which may have its name too, holds users' code."""

LIBRARIES = ("site-packages", "dist-packages")
"""What Python calls the folders that it installs into."""


def whose(file: str) -> Owner:
    """Whose code is in a file, as a frame of a traceback names it; code without a file is Python's.

    A library's file is one in a folder of libraries that Python looks into: a user's project may
    lie under a folder of such a name as well. Links are followed, and not, for either may say it.
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
        *(path for path in map(Path, sys.path) if path.name in LIBRARIES),
    ]


def _is_in(file: str, folders: Iterable[Path]) -> bool:
    files = _names(file)
    names = [name for folder in folders for name in _names(folder)]
    return any(each.is_relative_to(name) for each in files for name in names)


def _names(path: str | Path) -> set[Path]:
    return {Path(os.path.abspath(path)), Path(os.path.realpath(path))}
