"""What a run has written of its bits on its way: each step's loss, exactly, and some digests."""

from dataclasses import dataclass
from pathlib import Path

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
