"""Who computed how many micro-batches of a step, and what balanced shares would bring."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from firecaffe.errors import RunError
from firecaffe.exchange.leaves import Shares
from firecaffe.reference import shown
from firecaffe.runs.folder import RECIPE, read_run_recipe
from firecaffe.synchrony.shares import GAIN, balanced_shares, longest_s
from firecaffe.words import MOST_MICRO_BATCHES


@dataclass(frozen=True)
class Row:
    """How many ranks hold one model together, in a run that has rows of ranks."""

    size: int = 1
    at_a_time: int = 1
    """Micro-batches that a row computes at a time: one, or each of its ranks one."""


ALONE = Row()


@dataclass(frozen=True)
class RankShares:
    """The micro-batches of each rank, or of each row of ranks, in rank order."""

    micro_batches: list[int]
    """In the last step."""
    seconds: list[float]
    """What each rank takes for one: the median over steps, the first left out."""
    balanced: list[int]
    """Those of the shortest step, by these seconds."""
    saved: float
    """The part of a step's time that they would save."""
    who: str = "ranks"

    @property
    def are_equal(self) -> bool:
        """Whether no rank had more than one more than another."""
        return max(self.micro_batches) - min(self.micro_batches) <= 1


def row_of(folder: Path) -> Row:
    """The rows of a run, by its recipe; timings of someone else's training have none.

    Raises: RunError if the recipe is damaged.
    """
    if not (folder / RECIPE).exists():
        return ALONE
    words = read_run_recipe(folder).get("parallel", {})  # it may be older than the section
    stages, model = len(words.get("stages") or ()) + 1, words.get("model", 1)
    is_split = stages == 1 or words.get("split")
    size = stages * model if is_split else stages
    return Row(size, size if words.get("scheme") == "one_weird_trick" else 1)


def shares_of(
    timings: Mapping[int, Sequence[Mapping[str, Any]]], row: Row = ALONE
) -> RankShares | None:
    """The shares of a run, by its timings; None if they do not tell, or of one rank or row. A row
    takes as long as its slowest rank, with what that waits for the others of it.

    Raises: RunError if they tell of more micro-batches than there may be.
    """
    of_ranks = [rows for rows in timings.values() if rows]
    is_told = all(each.get("micro_batches") for rows in of_ranks for each in rows)
    if not is_told or len(of_ranks) % row.size or len(of_ranks) < 2 * row.size:
        return None
    firsts = range(0, len(of_ranks), row.size)
    counts = [int(of_ranks[first][-1]["micro_batches"]) for first in firsts]
    if not 0 <= min(counts) <= sum(counts) <= MOST_MICRO_BATCHES:
        raise RunError(
            f"timings: micro_batches of the ranks are {shown(counts)}; a step has at most "
            f"{MOST_MICRO_BATCHES:,}"
        )
    of_each = [median(map(_seconds, rows[1:] or rows)) for rows in of_ranks]
    seconds = [max(of_each[first : first + row.size]) for first in firsts]
    if min(seconds) <= 0:
        return None
    best = balanced_shares(sum(counts), seconds)
    now_s = longest_s(_ranges(counts), seconds)
    step_s = median(each["step_s"] for rows in of_ranks for each in rows[1:] or rows)
    saved = max(0.0, now_s - longest_s(best, seconds)) / step_s
    return RankShares(
        [count * row.at_a_time for count in counts],
        [each / row.at_a_time for each in seconds],
        [len(share) * row.at_a_time for share in best],
        saved,
        "ranks" if row == ALONE else "rows",
    )


def shares_line(found: RankShares, slow: Sequence[int]) -> str:
    """What is to be said of shares. slow: the ranks that are shown to compute longer."""
    if not found.are_equal:
        taken = ", ".join(f"{each * 1e3:.3g}" for each in found.seconds)
        counts = _words(found.micro_batches)
        return f"{found.who} computed {counts} micro-batches; one takes {taken} ms"
    if slow and found.saved >= GAIN:
        return (
            f"synchrony.shares = measured would give {found.who} {_words(found.balanced)} "
            "micro-batches: "
            f"a step {found.saved:.0%} shorter, with the same result"
        )
    return ""


def _seconds(row: Mapping[str, Any]) -> float:
    """What a rank took for a micro-batch of one step, with waits for its row."""
    in_row_s = (row.get("idle_s") or 0.0) + (row.get("activations_s") or 0.0)
    own_s: float = row["data_s"] + row["compute_s"] + in_row_s
    return own_s / int(row["micro_batches"])


def _ranges(counts: Sequence[int]) -> Shares:
    starts = [sum(counts[:rank]) for rank in range(len(counts))]
    return tuple(range(start, start + count) for start, count in zip(starts, counts, strict=True))


def _words(counts: Sequence[int]) -> str:
    return ", ".join(map(str, counts))
