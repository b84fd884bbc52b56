"""Options that several commands share: of a network without a recipe, and of a cluster file."""

from collections.abc import Callable
from typing import Any

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
