"""The options of a network that the command line names, without a recipe."""

from collections.abc import Callable
from typing import Any

NAME = "a network of docs/models, or a function's: package.module:function, path/file.py:function"


def network_words(add: Callable[..., Any]) -> None:
    add("--args", type=dict[str, Any], default={}, metavar="TABLE", help="as '{width = 32}'")
    add("--input", type=str, default="", metavar="CxHxW", help="as 3x224x224; else its own")
