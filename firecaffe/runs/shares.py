"""Who computed how many micro-batches of a step, and what balanced shares would bring."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from firecaffe.exchange.leaves import Shares
from firecaffe.synchrony.shares import GAIN, balanced_shares, longest_s


@dataclass(frozen=True)
class RankShares:
    """The micro-batches of each rank, in rank order."""

    micro_batches: list[int]
    """In the last step."""
    seconds: list[float]
    """What each rank takes for one: the median over steps, the first left out."""
    balanced: list[int]
    """Those of the shortest step, by these seconds."""
    saved: float
    """The part of a step's time that they would save."""

    @property
    def are_equal(self) -> bool:
        """Whether no rank had more than one more than another."""
        return max(self.micro_batches) - min(self.micro_batches) <= 1


def shares_of(timings: Mapping[int, Sequence[Mapping[str, Any]]]) -> RankShares | None:
    """The shares of a run, by its timings; None if they do not tell, or of one rank."""
    rows_of = [rows for rows in timings.values() if rows]
    if len(rows_of) < 2 or any(not row.get("micro_batches") for rows in rows_of for row in rows):
        return None
    counts = [int(rows[-1]["micro_batches"]) for rows in rows_of]
    seconds = [median(map(_seconds, rows[1:] or rows)) for rows in rows_of]
    if min(seconds) <= 0:
        return None
    best = balanced_shares(sum(counts), seconds)
    now_s = longest_s(_ranges(counts), seconds)
    step_s = median(row["step_s"] for rows in rows_of for row in rows[1:] or rows)
    saved = max(0.0, now_s - longest_s(best, seconds)) / step_s
    return RankShares(counts, seconds, [len(share) for share in best], saved)


def shares_line(found: RankShares, slow: Sequence[int]) -> str:
    """What is to be said of shares. slow: the ranks that are shown to compute longer."""
    if not found.are_equal:
        taken = ", ".join(f"{each * 1e3:.3g}" for each in found.seconds)
        return f"ranks computed {_words(found.micro_batches)} micro-batches; one takes {taken} ms"
    if slow and found.saved >= GAIN:
        return (
            f"synchrony.shares = measured would give ranks {_words(found.balanced)} micro-batches: "
            f"a step {found.saved:.0%} shorter, with the same result"
        )
    return ""


def _seconds(row: Mapping[str, Any]) -> float:
    """What a rank took for a micro-batch of one step."""
    own_s: float = row["data_s"] + row["compute_s"]
    return own_s / int(row["micro_batches"])


def _ranges(counts: Sequence[int]) -> Shares:
    starts = [sum(counts[:rank]) for rank in range(len(counts))]
    return tuple(range(start, start + count) for start, count in zip(starts, counts, strict=True))


def _words(counts: Sequence[int]) -> str:
    return ", ".join(map(str, counts))
