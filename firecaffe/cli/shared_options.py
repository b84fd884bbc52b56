"""Options that several commands share: of a network without a recipe, and of a cluster file."""

from collections.abc import Callable
from typing import Any

from jsonargparse import Namespace

from firecaffe.api.answer import check_cluster_file
from firecaffe.cli.arguments import Parser
from firecaffe.errors import RecipeError
from firecaffe.planner.cluster import Cluster, load_cluster

NAME = (
    "a network by name, as resnet50 (docs/reference/networks.md), or your own function: "
    "package.module:function, path/file.py:function"
)


def network_words(add: Callable[..., Any]) -> None:
    add(
        "--args",
        type=dict[str, Any],
        default={},
        metavar="TABLE",
        help="arguments of your own function, as '{width = 32}'",
    )
    add("--input", metavar="CxHxW", help="shape of a sample, as 3x224x224; else the network's own")


DEFAULT_CLUSTER = "cpu-host"


def add_cluster_file(parser: Parser, what: str) -> None:
    """Add --write, described by `what`, and --cluster, which it starts from."""
    parser.add("--write", metavar="FILE", help=what)
    parser.add_overwrite()
    parser.add(
        "--cluster",
        metavar="NAME",
        help=f"with --write: the cluster that the file starts from; else {DEFAULT_CLUSTER}",
    )


def cluster_to_write(options: Namespace) -> Cluster | None:
    """Load the cluster to update; None without `--write`. Raises RecipeError or RunError."""
    check_cluster_file(options.write, options.overwrite)
    if options.write:
        return load_cluster(options.cluster or DEFAULT_CLUSTER)
    if options.cluster:
        raise RecipeError("--cluster is what else --write puts into its file; --write is missing")
    return None
