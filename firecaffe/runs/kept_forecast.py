"""Reads a run's forecast, and chooses the steps by which it is scored."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firecaffe.errors import RunError
from firecaffe.runs.rank_times import Rows
from firecaffe.runs.run_folder import FORECAST, read_run_file
from firecaffe.schema import checked


@dataclass(frozen=True)
class KeptForecast:
    """The last forecast of a run, which may have replaced the one before the first step."""

    place: Path
    row: Mapping[str, Any]
    timings: Rows
    """Of the steps that it did not know, after one that readers leave out."""
    first_s: float | None = None
    """A step by the first forecast, if this one replaced it."""

    def read_as(self, kind: Any) -> Mapping[str, Any]:
        """Check it by a schema. Raises: RunError."""
        try:
            row: Mapping[str, Any] = checked(self.row, kind)
        except ValueError as error:
            raise RunError(f"{self.place}: {error}") from error
        return row


def read_forecast(folder: Path, timings: Rows) -> KeptForecast | None:
    """Read a run's last forecast that later steps can score; None without one. Raises: RunError."""
    place = folder / FORECAST
    if not place.is_file():
        return None
    first = read_run_file(folder, FORECAST)
    refined = first.get("refined")
    if refined is not None:
        later = _from(timings, refined["made_from"]["last_step"])
        if any(len(rows) > 1 for rows in later.values()):
            return KeptForecast(place, refined, later, first.get("step_s"))
    return KeptForecast(place, first, timings)


def _from(timings: Rows, step: int) -> dict[int, Sequence[Mapping[str, Any]]]:
    return {rank: [row for row in rows if row["step"] >= step] for rank, rows in timings.items()}
