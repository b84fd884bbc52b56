"""What a run has written of its bits on its way: each step's loss, exactly, and some digests."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from firecaffe.errors import RunError
from firecaffe.runs.folder import DIGESTS, METRICS, WEIGHTS
from firecaffe.runs.record import read_json_lines

Value = TypeVar("Value")


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
    return Recorded(
        losses=_by_step(folder / METRICS, _loss, kind="train"),
        weights=_by_step(folder / WEIGHTS, lambda row: str(row["sha256"])),
        tensors=_by_step(folder / DIGESTS, lambda row: dict(row["tensors"])),
    )


def _loss(row: dict[str, Any]) -> float | None:
    return None if row["loss"] is None else float(row["loss"])


def _by_step(
    path: Path, value: Callable[[dict[str, Any]], Value], kind: str | None = None
) -> dict[int, Value]:
    """The rows of a file, or those of a kind, by their steps; none if there is no such file."""
    try:
        rows = (row for row in read_json_lines(path) if row.get("kind") == kind)
        return {int(row["step"]): value(row) for row in rows}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path}: cannot be read ({type(error).__name__}: {error})") from error
