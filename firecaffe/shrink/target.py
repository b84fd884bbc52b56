"""What a file is to reach: a ratio, a size, or the accuracy that it may lose."""

import re
from dataclasses import dataclass
from math import isfinite
from typing import Literal

from firecaffe.compression.transfer import BYTES_PER_WEIGHT
from firecaffe.errors import RecipeError

UNITS = {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
"""Bytes of each unit of a size, in capitals."""

EXPECTED = "expected a ratio (40x), a size (27KB) or the accuracy that may be lost (0.1points)"


@dataclass(frozen=True)
class Target:
    """What is asked for, in one of three units."""

    word: str
    """As it was typed."""
    kind: Literal["ratio", "bytes", "points"]
    value: float

    @property
    def is_of_size(self) -> bool:
        """Whether the file's size is asked for, and its accuracy follows."""
        return self.kind != "points"

    def most_bytes(self, weights: int) -> float:
        """The size asked for, of a network of so many weights."""
        return self.value if self.kind == "bytes" else weights * BYTES_PER_WEIGHT / self.value


def parse_target(word: str) -> Target:
    """Raises: RecipeError if it is no target."""
    found = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([a-zA-Z]+)\s*", word)
    if found is None:
        raise RecipeError(f"--target is {word!r}; {EXPECTED}")
    value, unit = float(found[1]), found[2].upper()
    if not isfinite(value):
        raise RecipeError(f"--target is {word:.20}…, which is too large a number; {EXPECTED}")
    if unit == "X":
        if value <= 1:
            raise RecipeError(f"--target is {word}; a ratio must be more than 1")
        return Target(word, "ratio", value)
    if unit in ("POINT", "POINTS"):
        return Target(word, "points", value)
    if unit not in UNITS:
        raise RecipeError(f"--target is {word!r}, in an unknown unit; {EXPECTED}")
    if value * UNITS[unit] < 1:
        raise RecipeError(f"--target is {word}; a size must be at least one byte")
    return Target(word, "bytes", value * UNITS[unit])
