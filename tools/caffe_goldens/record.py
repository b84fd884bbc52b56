"""What the real Caffe made of a case, as it stands in the file of its family."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).resolve().parents[2] / "tests" / "golden" / "caffe"


@cache
def arrays(family: str) -> dict[str, np.ndarray]:
    with np.load(FOLDER / f"{family}.npz") as file:
        return {name: file[name] for name in file.files}


class Record:
    """One case's arrays, by kind and name (the kinds: make.py)."""

    def __init__(self, family: str, case: str) -> None:
        self.of = {
            tuple(name.split(":", 2)[1:]): value
            for name, value in arrays(family).items()
            if name.startswith(f"{case}:")
        }

    def kind(self, kind: str) -> dict[str, np.ndarray]:
        """The arrays of that kind, by name."""
        return {name: value for (found, name), value in self.of.items() if found == kind}
