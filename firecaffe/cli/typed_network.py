"""A network that the command line names, without a recipe: its options, and what they give."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jsonargparse import Namespace

from firecaffe.errors import RecipeError
from firecaffe.models.config import ModelConfig
from firecaffe.user_code import is_caffe
from firecaffe.value_checks import check_kinds_of

MOST_PIXELS = 65_536


def network_of(options: Namespace) -> tuple[ModelConfig, tuple[int, int, int] | None]:
    """Return the network, and the shape of its images if one is typed. Raises RecipeError."""
    config = ModelConfig(options.model, options.args)
    check_kinds_of("model", config)
    shape = parse_input(options.input) if options.input else None
    if shape and is_caffe(config.name):
        config = replace(config, args={"input_CHW": list(shape), **config.args})
    return config, shape


def parse_input(text: str, word: str = "--input") -> tuple[int, int, int]:
    """Parse CxHxW (channels, rows, columns), typed after `word`. Raises RecipeError."""
    try:
        channels, rows, columns = (int(part) for part in text.split("x"))
    except ValueError:
        channels = rows = columns = 0
    if min(channels, rows, columns) < 1 or max(channels, rows, columns) > MOST_PIXELS:
        raise RecipeError(
            f"{word} is {text!r}; it must be channels x rows x columns, as 3x224x224, each 1 to "
            f"{MOST_PIXELS:,}"
        )
    return channels, rows, columns


NAME = "a network of docs/models, or a function's: package.module:function, path/file.py:function"


def network_words(add: Callable[..., Any]) -> None:
    add("--args", type=dict[str, Any], default={}, metavar="TABLE", help="as '{width = 32}'")
    add("--input", type=str, default="", metavar="CxHxW", help="as 3x224x224; else its own")
