"""The explanation of what a mode adds to a run: averages of replicas, or a server's learners.

With a server, for each step after the warm ones, the timings of rank 0 have the micro-batches of
each rank and their seconds. A rank is slow if its micro-batches take longer than the median of the
others', by a signed-rank test over blocks of steps, as in `runs.rank_times`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from firecaffe.errors import RunError
from firecaffe.runs.rank_times import Rows, Slow, in_blocks, slow_by_blocks
from firecaffe.runs.run_folder import read_run_file
from firecaffe.runs.schemas import ServerResult


def local_lines(folder: Path, timings: Rows) -> list[str]:
    """Describe the averages. Times are the longest of the ranks' means. Raises RunError."""
    said, sent = list[str](), list[float]()
    if (folder / "result.json").is_file():
        result = read_run_file(folder, "result.json")
        row = result.get("synchrony") or {}
        said.append(f"{row.get('replicas')} replicas, {row.get('averages')} averages")
        by_rank = result.get("sent_bytes_per_step_by_rank") or []
        sent = [of_rank for of_rank in by_rank if of_rank]  # none if one rank hosts all
    averaging = [
        averages
        for rows in timings.values()
        if (averages := [r for r in rows if r.get("exchange_s")])
    ]
    if averaging:
        took_s, waited_s = (
            max(fmean(row[word] for row in averages) for averages in averaging)
            for word in ("exchange_s", "exposed_communication_s")
        )
        said.append(
            f"by the means of the ranks, an average takes at most {took_s * 1e3:,.1f} ms, and is "
            f"waited for at most {waited_s * 1e3:,.1f} ms"
        )
    return [*said, f"a rank sends {max(sent) / 1e6:,.3g} MB a step"] if sent else said


MAX_BARS = 8

Taken = Mapping[int, tuple[int, float]]


@dataclass(frozen=True)
class ServedRank:
    """The learners of one rank. `idle` and bytes are None if the run did not finish."""

    rank: int
    micro_batches: int
    seconds: float
    """Mean seconds to fetch and compute a micro-batch."""
    idle: float | None
    """The share of the time in which the rank neither fetched nor computed."""
    pulled_bytes: int | None
    """Weights that its learners received, and gradients that they sent."""
    pushed_bytes: int | None


@dataclass(frozen=True)
class ServedExplanation:
    steps: int
    """The number of steps after the warm ones."""
    step_s: float
    """Mean seconds between updates, without the first step."""
    update_s: float
    ranks: list[ServedRank]
    slow: list[Slow]
    not_tested: list[str]
    came_to: dict[str, Any] | None
    lines: list[str]


def explain_served(folder: Path, timings: Rows) -> ServedExplanation | None:
    """Return None if the run has no server, or only warm steps so far. Raises RunError."""
    rows = [row for row in timings.get(0, ()) if row.get("by_rank")]
    if not rows:
        return None
    came_to: dict[str, Any] | None = None
    if (folder / "result.json").is_file():
        came_to = read_run_file(folder, "result.json", ServerResult)["synchrony"]
        _check_bytes(folder, came_to)
    taken = [{int(rank): part for rank, part in row["by_rank"].items()} for row in rows]
    ranks = sorted({rank for step in taken for rank in step})
    slow, not_tested = _slow(taken, ranks)
    return ServedExplanation(
        steps=len(rows),
        step_s=fmean(row["step_s"] for row in rows[1:] or rows),
        update_s=fmean(row["update_s"] for row in rows[1:] or rows),
        ranks=[_rank(rank, taken, came_to or {}) for rank in ranks],
        slow=slow,
        not_tested=not_tested,
        came_to=came_to,
        lines=_lines(came_to),
    )


def _check_bytes(folder: Path, came_to: Mapping[str, Any]) -> None:
    for word in ("pulled_bytes_by_learner", "pushed_bytes_by_learner"):
        lacks = came_to.get("rank_by_learner", {}).keys() - came_to.get(word, {}).keys()
        if lacks:
            raise RunError(f"{folder / 'result.json'}: {word} lacks learner {min(lacks)}")


def _lines(row: Mapping[str, Any] | None) -> list[str]:
    if row is None:
        return ["the run did not finish: its staleness, idle shares and bytes are known at its end"]
    again = f", {row['again']:,} computed again" if row.get("again") else ""
    lost = f"; learners lost: {row['lost_learners']:,}" if row["lost_learners"] else ""
    counts = {int(late): count for late, count in row["staleness"].items()}
    lines = [
        f"{row['updates']:,} updates of {row['gradients']:,} gradients, {row['dropped']:,} dropped"
        f"{again}{lost}"
    ]
    if counts:
        lines.append(
            f"staleness: mean {row['mean_staleness']:.2f}, at most {max(counts)}; {_bars(counts)}"
        )
    if "idle_by_rank" not in row:  # a simulated clock, whose learners are no ranks
        idle = list(row.get("idle_by_learner", {}).values()) or [0.0]
        lines.append(f"learners waited {fmean(idle):.1%} of their time (at most {max(idle):.1%})")
    return lines


def _bars(counts: Mapping[int, int]) -> str:
    total = max(1, sum(counts.values()))
    shown = sorted(counts.items())[:MAX_BARS]
    said = [f"{late}: {count / total:.1%}" for late, count in shown]
    rest = total - sum(count for _, count in shown)
    return ", ".join([*said, *([f"more: {rest / total:.1%}"] if rest else [])])


def _rank(rank: int, taken: Sequence[Taken], came_to: Mapping[str, Any]) -> ServedRank:
    portions = [step[rank] for step in taken if rank in step]
    count, seconds = sum(count for count, _ in portions), sum(seconds for _, seconds in portions)
    learners = [n for n, of in came_to.get("rank_by_learner", {}).items() if of == rank]
    pulled, pushed = (
        sum(int(came_to[f"{word}_bytes_by_learner"][n]) for n in learners) if learners else None
        for word in ("pulled", "pushed")
    )
    idle = came_to.get("idle_by_rank", {}).get(str(rank))
    return ServedRank(rank, count, seconds / max(1, count), idle, pulled, pushed)


def _slow(taken: Sequence[Taken], ranks: Sequence[int]) -> tuple[list[Slow], list[str]]:
    blocks, notes = in_blocks(taken, len(ranks))
    if notes:
        return [], notes
    means = {
        rank: [_mean([step[rank] for step in block if rank in step]) for block in blocks]
        for rank in ranks
    }
    # The other ranks were lost, or joined later.
    whole = {
        rank: [mean for mean in of_rank if mean is not None]
        for rank, of_rank in means.items()
        if None not in of_rank
    }
    if len(whole) < 2:
        return [], ["no two ranks have brought something in every part of the run"]
    return slow_by_blocks(whole), []


def _mean(taken: Sequence[tuple[int, float]]) -> float | None:
    count = sum(count for count, _ in taken)
    return sum(seconds for _, seconds in taken) / count if count else None
