"""What is fuzzed: how files of a kind are made, and how they are read."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Reader:
    """A row of a table of readers."""

    make: Callable[[Path], object]
    """Makes whole files in an empty folder."""
    read: Callable[[Path], object]
    """Reads that folder: returns, or raises one of firecaffe's errors."""
    after: Callable[[Path], object] = lambda _: None
    """Done to the folder after the damage, as a stranger would, so that it gets behind digests."""
    damaged: str = "*"
    """A pattern of the names of the files that are damaged."""
