"""The bits that a run has recorded: each step's exact loss, and digests of tensors."""

from dataclasses import dataclass
from pathlib import Path

from firecaffe.errors import RunError
from firecaffe.runs.run_folder import DIGESTS, METRICS, WEIGHTS
from firecaffe.runs.schemas import DigestsRow, LossRow, WeightsRow
from firecaffe.schema import read_rows


@dataclass(frozen=True)
class Recorded:
    losses: dict[int, float | None]
    """The mean loss of each step, counted from 1; None if it was not finite."""
    weights: dict[int, str]
    """The SHA-256 of all parameters and buffers, after evaluations and checkpoints."""
    tensors: dict[int, dict[str, str]]
    """The digests of the state's tensors and of the losses, by step and name, if run.digests."""

    @property
    def last(self) -> int:
        return max(self.losses, default=0)


def recorded_of(folder: Path) -> Recorded:
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
    """The first step, counted from 1, and its first tensor in network order."""

    step: int
    tensor: str


def first_difference(run: Path, other: Path) -> FirstDifference | None:
    """Compare the digests of two runs, which need equal steps and tensors. Raises RunError."""
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
