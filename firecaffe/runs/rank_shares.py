"""The number of micro-batches that each rank computed in a step, and balanced shares."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import mul
from pathlib import Path
from statistics import median
from typing import Any

from firecaffe.errors import RunError
from firecaffe.runs.run_folder import recorded_section
from firecaffe.synchrony.shares import GAIN, balanced_shares, longest_s
from firecaffe.user_code import shown
from firecaffe.value_checks import MAX_MICRO_BATCHES


@dataclass(frozen=True)
class WorkerRow:
    """The ranks that hold one model together."""

    size: int = 1
    at_a_time: int = 1
    """Micro-batches that the row computes at the same time: one, or one on each rank."""


ALONE = WorkerRow()


@dataclass(frozen=True)
class RankShares:
    """The micro-batches of each rank, or of each row of ranks, in rank order."""

    micro_batches: list[int]
    seconds: list[float]
    """Median of a micro-batch, without the first step."""
    balanced: list[int]
    saved: float
    """The share of a step's time that the balanced counts would save."""
    who: str = "ranks"

    @property
    def are_equal(self) -> bool:
        return max(self.micro_batches) - min(self.micro_batches) <= 1


def row_of(folder: Path) -> WorkerRow:
    """Return the rows of a run by its recipe; ALONE without a recipe. Raises RunError."""
    parallel = recorded_section(folder, "parallel")
    stages, model = len(parallel.get("stages") or ()) + 1, parallel.get("model", 1)
    is_split = stages == 1 or parallel.get("split")
    size = stages * model if is_split else stages
    return WorkerRow(size, size if parallel.get("scheme") == "one_weird_trick" else 1)


def shares_of(
    timings: Mapping[int, Sequence[Mapping[str, Any]]], row: WorkerRow = ALONE
) -> RankShares | None:
    """Return the shares of a run; None for one rank or row, or if its timings lack them.

    A row takes as long as its slowest rank. Raises RunError.
    """
    of_ranks = [rows for rows in timings.values() if rows]
    is_told = all(timing.get("micro_batches") for rows in of_ranks for timing in rows)
    if not is_told or len(of_ranks) % row.size or len(of_ranks) < 2 * row.size:
        return None
    firsts = range(0, len(of_ranks), row.size)
    counts = [int(of_ranks[first][-1]["micro_batches"]) for first in firsts]
    if not 0 <= min(counts) <= sum(counts) <= MAX_MICRO_BATCHES:
        raise RunError(
            f"timings: micro_batches of the ranks are {shown(counts)}; a step has at most "
            f"{MAX_MICRO_BATCHES:,}"
        )
    of_each = [median(map(_seconds, rows[1:] or rows)) for rows in of_ranks]
    seconds = [max(of_each[first : first + row.size]) for first in firsts]
    if min(seconds) <= 0:
        return None
    best = balanced_shares(sum(counts), seconds)
    now_s = max(map(mul, counts, seconds))
    step_s = median(timing["step_s"] for rows in of_ranks for timing in rows[1:] or rows)
    saved = max(0.0, now_s - longest_s(best, seconds)) / step_s
    return RankShares(
        [count * row.at_a_time for count in counts],
        [time_s / row.at_a_time for time_s in seconds],
        [len(share) * row.at_a_time for share in best],
        saved,
        "ranks" if row == ALONE else "rows",
    )


def shares_line(found: RankShares, slow: Sequence[int]) -> str:
    """Describe the shares. `slow` are the ranks that are shown to compute longer."""
    if not found.are_equal:
        taken = ", ".join(f"{time_s * 1e3:.3g}" for time_s in found.seconds)
        counts = _words(found.micro_batches)
        return f"{found.who} computed {counts} micro-batches; one takes {taken} ms"
    if slow and found.saved >= GAIN:
        return (
            f"synchrony.shares = measured would give {found.who} {_words(found.balanced)} "
            f"micro-batches: a step {found.saved:.0%} shorter, with the same result"
        )
    return ""


def _seconds(row: Mapping[str, Any]) -> float:
    in_row_s = (row.get("idle_s") or 0.0) + (row.get("activations_s") or 0.0)
    own_s: float = row["data_s"] + row["compute_s"] + in_row_s
    return own_s / int(row["micro_batches"])


def _words(counts: Sequence[int]) -> str:
    return ", ".join(map(str, counts))
