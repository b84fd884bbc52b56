"""Options that several commands share: of a network without a recipe, and of a cluster file."""

from collections.abc import Callable
from typing import Any

from firecaffe.api.answer import DEFAULT_CLUSTER
from firecaffe.cli.arguments import Parser

NAME = (
    "a network by name, as resnet50 (docs/reference/networks.md), or your own function: "
    "package.module:function, path/file.py:function"
)


def add_network_options(add: Callable[..., Any]) -> None:
    add(
        "--args",
        type=dict[str, Any],
        default={},
        metavar="TABLE",
        help="arguments of your own function, as '{width = 32}'",
    )
    add("--input", metavar="CxHxW", help="shape of a sample, as 3x224x224; else the network's own")


def add_cluster_file(parser: Parser, what: str) -> None:
    """Add --write, described by `what`, and --cluster, which it starts from."""
    parser.add("--write", metavar="FILE", help=what)
    parser.add_overwrite()
    parser.add(
        "--cluster",
        metavar="NAME",
        help=f"with --write: the cluster that the file starts from; else {DEFAULT_CLUSTER}",
    )
