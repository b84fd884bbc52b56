"""What a launcher hands to its ranks beside their command line, so that none finds it out again."""

import os
import pickle
from pathlib import Path

from firecaffe.cluster.last_word import LAUNCHED

HANDED = "FIRECAFFE_HANDED"
"""Environment variable of ranks: the file with the value handed to them, or empty."""


def hand(value: object, folder: Path) -> dict[str, str]:
    """Write a value for ranks into their launcher's private folder; return their variables."""
    if value is None:
        return {HANDED: ""}
    path = folder / "handed"
    path.write_bytes(pickle.dumps(value))
    return {HANDED: str(path)}


def handed() -> object:
    """Return the value that this rank's launcher has handed to it, if any."""
    path = os.environ.get(HANDED)
    return pickle.loads(Path(path).read_bytes()) if path and LAUNCHED in os.environ else None
