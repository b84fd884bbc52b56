"""The parts of each rank's time in a run, and tests for ranks that are slow beyond the noise.

A rank *computes* longer than others if its time before it waits (data, forward, backward) is longer
than the median of the others' (of the same stage, if there are stages), by a signed-rank test over
blocks of steps. A rank's *link* is slow if its round trips to other hosts take longer than those
between all other ranks, by a rank-sum test over blocks. Both tests are one-sided, at ALPHA over all
ranks together (Holm). They count blocks because neighboring steps are correlated. A rank measures
round trips to few others (`cluster.links`), so those of a rank found slow are left out of the tests
of the others.

Source: Wilcoxon 1945; Mann and Whitney 1947; Holm 1979.
"""

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, log2
from pathlib import Path
from typing import Any, TypeVar

from firecaffe.errors import RunError
from firecaffe.runs.rank_shares import ALONE, RankShares, WorkerRow, row_of, shares_of
from firecaffe.runs.schemas import TimingRow, TripRow
from firecaffe.runs.statistics import cut_in_blocks
from firecaffe.schema import read_rows


@dataclass(frozen=True)
class StageTimes:
    """Medians over a stage's steps after the first. `own_s` has data, forward and backward."""

    stage: int
    own_s: float
    idle: float
    micro_batches: int


def stage_of(rows: Sequence[Mapping[str, Any]]) -> int | None:
    stage: int | None = rows[-1].get("stage") if rows else None
    return stage


def stages_of(timings: Mapping[int, Sequence[Mapping[str, Any]]]) -> list[StageTimes]:
    rows_by_stage: defaultdict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for rows in timings.values():
        stage = stage_of(rows)
        if stage is not None:
            rows_by_stage[stage] += rows[1:] or rows
    return [
        StageTimes(
            stage,
            statistics.median(row["data_s"] + row["compute_s"] for row in rows),
            statistics.median(row["idle_s"] / row["step_s"] for row in rows),
            max(row["micro_batches"] for row in rows),
        )
        for stage, rows in sorted(rows_by_stage.items())
    ]


PARTS = ("data_s", "compute_s", "exposed_communication_s", "update_s")

ALPHA = 0.01

BLOCKS = 10
"""The number of blocks of steps. To reach ALPHA, each doubling of the ranks adds one."""

MIN_STEPS = 5
"""Steps of a block, so that one slow event of a few steps does not count as several."""

BLOCKS_OF_PAIR = 4
"""Blocks, and so samples, of the round trips between two ranks."""
MIN_TRIPS = 3


Step = TypeVar("Step")

Rows = Mapping[int, Sequence[Mapping[str, Any]]]

Pairs = list[tuple[tuple[int, int], float]]
"""Two ranks, and the median of a block of round trips between them."""


@dataclass(frozen=True)
class RankTimes:
    """Medians over a rank's steps after the first, in seconds; means if ranks wait once a round."""

    rank: int
    steps: int
    step_s: float
    parts_s: dict[str, float]
    waits_s: dict[str, float]
    """The waits for activations and for gradients in a split network; otherwise empty."""

    @property
    def rest_s(self) -> float:
        return self.step_s - sum(self.parts_s.values())


@dataclass(frozen=True)
class Slow:
    rank: int
    cause: str
    """`computes`: before it waits for others; `link`: in sending or receiving."""
    own_s: float
    """The median of a step's time before waiting, or of a round trip."""
    others_s: float
    p_value: float
    samples: int

    @property
    def factor(self) -> float:
        return self.own_s / self.others_s if self.others_s else float("inf")


@dataclass(frozen=True)
class Explanation:
    ranks: list[RankTimes]
    slow: list[Slow]
    """The slowest first."""
    not_tested: list[str]
    shares: RankShares | None = None
    stages: list[StageTimes] = field(default_factory=list)


def explain(folder: Path) -> Explanation:
    """Explain the timings of a run, finished or not. Raises RunError if there are none."""
    return explain_rows(require_timings(folder), read_trips(folder), row=row_of(folder))


def explain_rows(
    timings: Rows, trips: Rows, in_rounds: bool = False, row: WorkerRow = ALONE
) -> Explanation:
    """Explain timings and round trips. `row`: the ranks that hold one model.

    `in_rounds`: ranks wait for each other only at the end of rounds, and have fixed shares.
    """
    middle = statistics.fmean if in_rounds else statistics.median
    ranks = [_times(rank, rows, middle) for rank, rows in timings.items() if rows]
    computers, not_tested = _slow_computers(timings)
    links, why = _slow_links(trips)
    stages = stages_of(timings)
    # Stages have different work, so only whole rows of stages have comparable shares.
    are_shared = not in_rounds and (not stages or row != ALONE)
    shares = shares_of(timings, row) if are_shared else None
    slow = sorted(
        [*computers, *links], key=lambda entry: entry.own_s - entry.others_s, reverse=True
    )
    return Explanation(ranks, slow, [*not_tested, *why], shares, stages)


def read_timings(folder: Path) -> dict[int, list[dict[str, Any]]]:
    return _by_rank(folder, "rank-*.jsonl", TimingRow)


def read_trips(folder: Path) -> dict[int, list[dict[str, Any]]]:
    return _by_rank(folder, "round-trips-*.jsonl", TripRow)


def last_change(timings: Rows) -> int:
    """Return the last step of other ranks than those of the end, as hosts may leave; or 0."""
    ranks_at: defaultdict[int, set[int]] = defaultdict(set)
    for rank, rows in timings.items():
        for row in rows:
            ranks_at[row["step"]].add(rank)
    last = ranks_at[max(ranks_at, default=0)]
    return max((step for step, ranks in ranks_at.items() if ranks != last), default=0)


def later_rows(rows: Rows, step: int) -> dict[int, list[Mapping[str, Any]]]:
    """Return the rows of steps after `step`, without the ranks that have none."""
    later = {rank: [row for row in own if row["step"] > step] for rank, own in rows.items()}
    return {rank: own for rank, own in later.items() if own}


def require_timings(folder: Path) -> dict[int, list[dict[str, Any]]]:
    timings = read_timings(folder)
    if not any(timings.values()):
        if not folder.exists():
            raise RunError(f"{folder}: there is no run")
        raise RunError(
            f"{folder}: holds no timings (timings/rank-*.jsonl); it is no run, or has done no step"
        )
    return timings


def _by_rank(folder: Path, pattern: str, kind: Any) -> dict[int, list[dict[str, Any]]]:
    by_rank = {}
    for path in (folder / "timings").glob(pattern):
        rank = path.stem.rpartition("-")[2]
        if rank.isdecimal():
            by_rank[int(rank)] = list(read_rows(path, kind))
    return dict(sorted(by_rank.items()))


def _times(
    rank: int,
    rows: Sequence[Mapping[str, Any]],
    middle: Callable[[Iterable[float]], float] = statistics.median,
) -> RankTimes:
    counted = rows[1:] or rows
    return RankTimes(
        rank,
        len(rows),
        middle(row["step_s"] for row in counted),
        {part: middle(row[part] for row in counted) for part in PARTS},
        {kind: middle(waits) for kind, waits in _waits(counted).items()},
    )


def _waits(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    if any(row.get("activations_s") is None for row in rows):
        return {}
    activations = [row["activations_s"] for row in rows]
    exposed = [row["exposed_communication_s"] for row in rows]
    gradients = [all_s - own_s for all_s, own_s in zip(exposed, activations, strict=True)]
    return {"activations": activations, "gradients": gradients}


def _slow_computers(timings: Rows) -> tuple[list[Slow], list[str]]:
    last = max(rows[-1]["step"] for rows in timings.values() if rows)
    seconds = {
        rank: {row["step"]: row["data_s"] + row["compute_s"] for row in rows[1:]}
        for rank, rows in timings.items()
        # Ranks that ended earlier belong to hosts that have left.
        if rows and rows[-1]["step"] >= last - 1
    }
    stage = {rank: stage_of(timings[rank]) for rank in seconds}
    if len(set(stage.values())) == len(seconds) > 1:
        return [], ["each stage has one rank: there is no other with the same work"]
    steps = sorted(set.intersection(*(set(by_step) for by_step in seconds.values())))
    blocks, notes = in_blocks(steps, len(seconds))
    if notes:
        return [], notes
    medians = {
        rank: [statistics.median(by_step[step] for step in block) for block in blocks]
        for rank, by_step in seconds.items()
    }
    return slow_by_blocks(medians, stage), []


def in_blocks(steps: Sequence[Step], ranks: int) -> tuple[list[Sequence[Step]], list[str]]:
    """Return blocks of a run's steps by which ranks are compared, or the reasons why not."""
    if ranks < 2:
        return [], ["one rank: there is no other to compare it with"]
    count = BLOCKS + ceil(log2(ranks))
    if len(steps) < count * MIN_STEPS:
        return [], [
            f"{len(steps)} steps are too few to tell a slow rank from noise; "
            f"it takes {count * MIN_STEPS}"
        ]
    return cut_in_blocks(steps, count), []


def slow_by_blocks(
    seconds: Mapping[int, Sequence[float]], work: Mapping[int, object] | None = None
) -> list[Slow]:
    """Return the ranks slower in their blocks of steps than others of the same `work`."""
    from scipy.stats import wilcoxon  # takes a second, and ranks import this file but do not test

    p_values, values = {}, {}
    work = work or dict.fromkeys(seconds)
    for rank, of_rank in seconds.items():
        equal_work = [
            seconds[other] for other in seconds if other != rank and work[other] == work[rank]
        ]
        if not equal_work:
            continue
        others = [
            statistics.median(of_other[i] for of_other in equal_work) for i in range(len(of_rank))
        ]
        gaps = [a - b for a, b in zip(of_rank, others, strict=True)]
        p_values[rank] = float(wilcoxon(gaps, alternative="greater").pvalue) if any(gaps) else 1.0
        values[rank] = statistics.median(of_rank), statistics.median(others)
    return [
        Slow(rank, "computes", *values[rank], p_value, len(seconds[rank]))
        for rank, p_value in holm(p_values).items()
        if p_value < ALPHA
    ]


def _slow_links(trips: Mapping[int, Sequence[Mapping[str, Any]]]) -> tuple[list[Slow], list[str]]:
    pairs = _between_hosts(trips)
    ranks = sorted({rank for ends, _ in pairs for rank in ends})
    if not ranks:
        return [], []
    if len({tuple(sorted(ends)) for ends, _ in pairs}) < 2:
        return [], ["two ranks have one link: there is no other to compare it with"]
    slow: list[Slow] = []
    tested = False
    while ranks:
        links = [link for link in (_slow_link(rank, pairs) for rank in ranks) if link is not None]
        tested = tested or bool(links)
        corrected = holm({link.rank: link.p_value for link in links})
        worst = min(links, key=lambda link: (link.p_value, link.rank), default=None)
        if worst is None or corrected[worst.rank] >= ALPHA:
            break
        slow.append(dataclasses.replace(worst, p_value=corrected[worst.rank]))
        # A slow way to this rank does not speak against the ranks at the other ends.
        pairs = [pair for pair in pairs if worst.rank not in pair[0]]
        ranks.remove(worst.rank)
    if not tested:
        return [], ["too few round trips between hosts to tell a slow link from noise"]
    return slow, []


def _slow_link(rank: int, pairs: Pairs) -> Slow | None:
    of_rank = [taken_s for ends, taken_s in pairs if rank in ends]
    others = [taken_s for ends, taken_s in pairs if rank not in ends]
    if min(len(of_rank), len(others)) < BLOCKS_OF_PAIR:
        return None
    from scipy.stats import mannwhitneyu  # as above

    p_value = float(mannwhitneyu(of_rank, others, alternative="greater").pvalue)
    medians = statistics.median(of_rank), statistics.median(others)
    return Slow(rank, "link", *medians, p_value, len(of_rank))


def _between_hosts(trips: Rows) -> Pairs:
    blocks = []
    for rank, rows in trips.items():
        by_peer: dict[int, list[float]] = defaultdict(list)
        for row in rows:
            if row["step"] > 1 and not row["in_host"]:
                by_peer[row["peer"]].append(row["round_trip_s"])
        for peer, taken in by_peer.items():
            if len(taken) >= BLOCKS_OF_PAIR * MIN_TRIPS:
                cut = cut_in_blocks(taken, BLOCKS_OF_PAIR)
                blocks += [((rank, peer), statistics.median(block)) for block in cut]
    return blocks


def holm(p_values: Mapping[int, float]) -> dict[int, float]:
    corrected: dict[int, float] = {}
    largest = 0.0
    for place, (name, p_value) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        largest = max(largest, min(1.0, (len(p_values) - place) * p_value))
        corrected[name] = largest
    return corrected


MIN_SHARE = 0.8
"""A smaller share means that other processes take the cores; a rank's own exchange takes less."""


def overloaded(timings: Rows) -> dict[int, float]:
    """The share of computing time in which a rank had a processor, if below MIN_SHARE.

    Runs on GPUs, and older ones, did not record it.
    """
    shares = {}
    for rank, rows in timings.items():
        counted = [row for row in rows[1:] if row.get("processor_s") is not None]
        computed_s = sum(row["compute_s"] for row in counted)
        if computed_s > 0:
            shares[rank] = sum(row["processor_s"] for row in counted) / computed_s
    return {rank: share for rank, share in shares.items() if share < MIN_SHARE}


def overload_lines(shares: dict[int, float]) -> list[str]:
    if not shares:
        return []
    ranks = ", ".join(map(str, shares))
    low, high = (f"{share:.0%}" for share in (min(shares.values()), max(shares.values())))
    share = low if low == high else f"{low} to {high}"
    return [
        f"the host is overloaded: rank{'s' * (len(shares) > 1)} {ranks} had a processor for "
        f"{share} of the time of computing; more processes are busy than there are cores"
    ]
