"""Cluster files made from measurements, for `firecaffe plan`."""

import dataclasses
from pathlib import Path
from typing import Any

import tomli_w
from jsonargparse import Namespace

from firecaffe.cli.arguments import Parser
from firecaffe.cli.console import check_target
from firecaffe.errors import RecipeError
from firecaffe.files import write_atomically
from firecaffe.plan.cluster import Cluster, load_cluster

DEFAULT_CLUSTER = "cpu-host"


def add_cluster_file(parser: Parser, what: str) -> None:
    """Add --write, described by `what`, and --cluster, which it starts from."""
    parser.add("--write", type=str, default="", metavar="FILE", help=what)
    parser.add_overwrite()
    parser.add(
        "--cluster",
        type=str,
        default="",
        metavar="NAME",
        help=f"with --write: what else the file says; else {DEFAULT_CLUSTER}",
    )


def write_cluster(path: Path, cluster: Cluster) -> None:
    write_atomically(path, tomli_w.dumps(as_table(cluster)))


def check_cluster_file(options: Namespace) -> None:
    """Raise RecipeError or RunError if a cluster file cannot be written to `--write`."""
    check_target("--write", options.write, options.overwrite, (".toml",))


def cluster_to_write(options: Namespace) -> Cluster | None:
    """Load the cluster to update; None without `--write`. Raises RecipeError or RunError."""
    check_cluster_file(options)
    if options.write:
        return load_cluster(options.cluster or DEFAULT_CLUSTER)
    if options.cluster:
        raise RecipeError("--cluster is what else --write puts into its file; --write is missing")
    return None


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
