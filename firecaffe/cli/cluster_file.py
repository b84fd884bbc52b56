"""Cluster files from what was measured: what `firecaffe plan` reads again."""

import dataclasses
from pathlib import Path
from typing import Any

import tomli_w
from jsonargparse import Namespace

from firecaffe.cli.console import check_target
from firecaffe.cli.options.plan import DEFAULT_CLUSTER
from firecaffe.errors import RecipeError
from firecaffe.files import write_atomically
from firecaffe.plan.cluster import Cluster, load_cluster


def write_cluster(path: Path, cluster: Cluster) -> None:
    """Writes a cluster file; never half of one."""
    write_atomically(path, tomli_w.dumps(as_words(cluster)))


def check_cluster_file(options: Namespace) -> None:
    """Raises: RecipeError or RunError if a cluster cannot be written to `--write`."""
    check_target("--write", options.write, options.overwrite, (".toml",))


def cluster_to_write(options: Namespace) -> Cluster | None:
    """What a measurement is put into, and written to `--write`; None if nothing is written.

    Raises: RecipeError or RunError if that cannot be.
    """
    check_cluster_file(options)
    if options.write:
        return load_cluster(options.cluster or DEFAULT_CLUSTER)
    if options.cluster:
        raise RecipeError("--cluster is what else --write puts into its file; --write is missing")
    return None


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
