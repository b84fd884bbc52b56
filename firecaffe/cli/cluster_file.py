"""Cluster files from what was measured: what `firecaffe plan` reads again."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import tomli_w

from firecaffe.errors import RecipeError
from firecaffe.plan.cluster import Cluster


def write_cluster(path: Path, cluster: Cluster) -> None:
    """Writes a cluster file; never half of one.

    Raises: RecipeError where its name is not one that the planner reads as a file.
    """
    check_path(path)
    aside = path.with_name(f"{path.name}.partial")
    aside.write_text(tomli_w.dumps(as_words(cluster)), encoding="utf-8")
    os.replace(aside, path)


def check_path(path: Path) -> None:
    """Raises: RecipeError."""
    if path.suffix != ".toml":
        raise RecipeError(f"--write is {path}; a cluster file must end in .toml")


def as_words(cluster: Cluster) -> dict[str, Any]:
    """The words of its file, without what is at its default."""
    return {name: value for name, value in _words(cluster).items() if value not in (None, {}, [])}


def _words(value: Any) -> dict[str, Any]:
    words: dict[str, Any] = {}
    for each in dataclasses.fields(value):
        part = getattr(value, each.name)
        if dataclasses.is_dataclass(part):
            words[each.name] = _words(part)
        elif isinstance(part, tuple) and part and dataclasses.is_dataclass(part[0]):
            words[each.name] = [_words(row) for row in part]
        elif part != each.default and part is not None:
            words[each.name] = list(part) if isinstance(part, tuple) else part
    return words
