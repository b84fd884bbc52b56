"""What a launcher hands to its ranks beside their command line, so that none finds it out again."""

import os
import pickle
from pathlib import Path

from firecaffe.cluster.last_word import LAUNCHED

HANDED = "FIRECAFFE_HANDED"
"""An environment variable of ranks: the file of what was handed to them, in their launcher's own
folder; empty if nothing was.
"""


def hand(value: object, folder: Path) -> dict[str, str]:
    """Writes a value for ranks into their launcher's folder, which nobody else can open. Returns
    the words by which they find it; for None those by which they find nothing.
    """
    if value is None:
        return {HANDED: ""}
    path = folder / "handed"
    path.write_bytes(pickle.dumps(value))
    return {HANDED: str(path)}


def handed() -> object:
    """What the launcher of this rank has handed to it; None if it has nothing, or there is none."""
    path = os.environ.get(HANDED)
    return pickle.loads(Path(path).read_bytes()) if path and LAUNCHED in os.environ else None
