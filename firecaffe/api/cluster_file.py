"""Cluster files made from measurements, for `firecaffe plan`."""

import dataclasses
from pathlib import Path
from typing import Any

import tomli_w

from firecaffe.api.answer import check_target
from firecaffe.files import write_atomically
from firecaffe.planner.cluster import Cluster
from firecaffe.resume_advice import option


def write_cluster(path: Path, cluster: Cluster) -> None:
    write_atomically(path, tomli_w.dumps(as_table(cluster)))


def check_cluster_file(write: str | Path, overwrite: bool) -> None:
    """Raise RecipeError or RunError if a cluster file cannot be written to the path `write`."""
    check_target(option("write"), str(write), overwrite, (".toml",))


def as_table(cluster: Cluster) -> dict[str, Any]:
    """Return the content of a cluster file, without values at their defaults."""
    return {name: value for name, value in _table(cluster).items() if value not in (None, {}, [])}


def _table(value: Any) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        part = getattr(value, field.name)
        if dataclasses.is_dataclass(part):
            table[field.name] = _table(part)
        elif isinstance(part, tuple) and part and dataclasses.is_dataclass(part[0]):
            table[field.name] = [_table(row) for row in part]
        elif part != field.default and part is not None:
            table[field.name] = list(part) if isinstance(part, tuple) else part
    return table
