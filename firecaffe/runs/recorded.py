"""What a run has written of its bits on its way: each step's loss, exactly, and some digests.

Where two runs first differ: the step and the tensor, from their digests.jsonl.
"""

from dataclasses import dataclass
from pathlib import Path

from firecaffe.errors import RunError
from firecaffe.runs.folder import DIGESTS, METRICS, WEIGHTS
from firecaffe.runs.schemas import DigestsRow, LossRow, WeightsRow
from firecaffe.schema import read_rows


@dataclass(frozen=True)
class Recorded:
    """All by step, counted from 1."""

    losses: dict[int, float | None]
    """The mean loss of each step; None if it was no number."""
    weights: dict[int, str]
    """The SHA-256 of all parameters and buffers, after evaluations and checkpoints."""
    tensors: dict[int, dict[str, str]]
    """The digest of each tensor of the state, by name, and of the losses; if they were asked for
    (run.digests)."""

    @property
    def last(self) -> int:
        """The last step that the run has recorded; 0 if it has none."""
        return max(self.losses, default=0)


def recorded_of(folder: Path) -> Recorded:
    """Reads what a run has recorded, finished or not. Raises: RunError."""
    losses = read_rows(folder / METRICS, LossRow, holding=b'"train"')
    weights = read_rows(folder / WEIGHTS, WeightsRow)
    tensors = read_rows(folder / DIGESTS, DigestsRow)
    return Recorded(
        losses={row["step"]: row["loss"] for row in losses if row["kind"] == "train"},
        weights={row["step"]: row["sha256"] for row in weights},
        tensors={row["step"]: row["tensors"] for row in tensors},
    )


@dataclass(frozen=True)
class FirstDifference:
    """The first step, counted from 1, and in it the first tensor in network order."""

    step: int
    tensor: str


def first_difference(run: Path, other: Path) -> FirstDifference | None:
    """None if all tensors are the same after every step.

    Raises: RunError if a run has no digests, or if they did not take the same steps with
    the same tensors.
    """
    for folder in (run, other):
        if not (folder / DIGESTS).exists():
            raise RunError(f"{run}, {other}: no digests of both (no {folder / DIGESTS})")
    rows, other_rows = (list(read_rows(folder / DIGESTS, DigestsRow)) for folder in (run, other))
    for row, other_row in zip(rows, other_rows, strict=False):
        tensors, other_tensors = row["tensors"], other_row["tensors"]
        if row["step"] != other_row["step"] or tensors.keys() != other_tensors.keys():
            raise RunError(f"{run} and {other} did not train the same tensors at the same steps")
        for name, value in tensors.items():
            if value != other_tensors[name]:
                return FirstDifference(row["step"], name)
    if len(rows) != len(other_rows):
        raise RunError(f"{run} has {len(rows)} steps, {other} has {len(other_rows)}")
    return None
