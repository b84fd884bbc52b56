"""The options of a network that the command line names, without a recipe."""

from collections.abc import Callable
from typing import Any

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
    add(
        "--input",
        type=str,
        default="",
        metavar="CxHxW",
        help="shape of a sample, as 3x224x224; else the network's own",
    )
