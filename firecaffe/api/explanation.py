"""`firecaffe.explain`: where the time went, which ranks are slow, the forecast's error."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from firecaffe.api.answer import Answer, numbers_table
from firecaffe.api.argument_checks import paths_of
from firecaffe.cluster.from_script import from_script
from firecaffe.errors import FirecaffeError, RecipeError, RunError
from firecaffe.gradients.config import NO_COMPRESSOR
from firecaffe.parallel.stages import idle_share
from firecaffe.planner.cluster import load_cluster
from firecaffe.recipe.refusals import is_refused
from firecaffe.runs.explain_modes import ServedExplanation, explain_served, local_lines
from firecaffe.runs.fault import NAME
from firecaffe.runs.kineto import is_trace, read_trace
from firecaffe.runs.noise_scale import noise_lines
from firecaffe.runs.rank_shares import RankShares, row_of, shares_line, shares_of
from firecaffe.runs.rank_times import (
    PARTS,
    Explanation,
    RankTimes,
    Rows,
    Slow,
    StageTimes,
    explain_rows,
    last_change,
    later_rows,
    overload_lines,
    overloaded,
    read_trips,
    require_timings,
)
from firecaffe.runs.run_folder import FORECAST, elsewhere, read_run_file, recorded_section
from firecaffe.runs.score import (
    ModeScore,
    ParallelScore,
    Score,
    causes,
    measured_parts,
    ms,
    score,
    score_mode,
    score_parallel,
    title_of,
)
from firecaffe.synchrony.config import LOCAL


def served_table(explained: ServedExplanation) -> Table:
    table = numbers_table("rank", "micro-batches", "one takes", "idle", "pulled", "pushed")
    for rank in explained.ranks:
        table.add_row(
            str(rank.rank),
            f"{rank.micro_batches:,}",
            f"{rank.seconds * 1e3:,.1f} ms",
            "-" if rank.idle is None else f"{rank.idle:.0%}",
            _megabytes(rank.pulled_bytes),
            _megabytes(rank.pushed_bytes),
        )
    return table


def served_lines(explained: ServedExplanation) -> list[str]:
    step = (
        f"{explained.steps:,} steps of {explained.step_s * 1e3:,.1f} ms; the server's updates take "
        f"{explained.update_s * 1e3:,.1f} ms of each"
    )
    slow = [sentence(rank, "a micro-batch takes") for rank in explained.slow]
    if not slow and not explained.not_tested:
        slow.append("no rank is shown to be slow: none beyond the noise")
    return [step, *explained.lines, *slow, *(f"not tested: {why}" for why in explained.not_tested)]


def _megabytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 1e6:,.1f} MB"


def stage_lines(stages: Sequence[StageTimes]) -> list[str]:
    """Describe which stage has the most work and how long each idles; empty without stages."""
    if not stages:
        return []
    most = max(stages, key=lambda stage: stage.own_s)
    own = ", ".join(ms(stage.own_s) for stage in stages)
    idle = ", ".join(f"{stage.idle:.0%}" for stage in stages)
    count, micro_batches = len(stages), stages[0].micro_batches
    expected = float(idle_share(count, micro_batches))
    return [
        f"stages: stage {most.stage} has the most work, and sets the pace: in a step they take "
        f"{own} with their data, and wait for others for {idle}",
        f"stages: {count} of equal work, with {micro_batches} micro-batches a step and messages "
        f"that take no time, idle for {expected:.0%} each",
    ]


MAX_MODES = 3

MIN_GAIN = 1.05
"""Least factor of the rate that is reported as a gain."""


def advice(folder: Path, seconds: Sequence[float], trust_code: bool) -> list[str]:
    """Return a line on the rate in other modes. `seconds` are each rank's for a micro-batch.

    The result is empty for a run without a forecast, whose cluster is unknown, and for a split
    network, which has no other mode. `trust_code` lets code that the run names run.
    """
    if not (folder / FORECAST).is_file() or "parallel" in read_run_file(folder, FORECAST):
        return []
    try:
        return [_other_modes(folder, seconds, trust_code)]
    except (FirecaffeError, ValueError) as error:
        return [f"what another mode would bring is not known: {error}"]


def _other_modes(folder: Path, seconds: Sequence[float], trust_code: bool) -> str:
    from firecaffe.planner.forecast import forecast
    from firecaffe.planner.modes import alternatives
    from firecaffe.planner.price import PRICED
    from firecaffe.planner.recipe_workload import workload_of
    from firecaffe.planner.step_cost import recipe_exchange
    from firecaffe.recipe.checked_recipe import recipe_of_run

    recipe = recipe_of_run(folder, trust_code=trust_code)
    kept = read_run_file(folder, FORECAST)
    if len(seconds) != kept.get("workers"):
        raise RunError(f"{len(seconds)} of {kept.get('workers')} ranks are in the timings")
    cluster = load_cluster(str(kept.get("cluster_file") or kept.get("cluster")))
    workload = workload_of(recipe)
    compressor = recipe.exchange.compressor
    compressor = compressor if compressor in PRICED else NO_COMPRESSOR
    exchange = recipe_exchange(workload, cluster, len(seconds))
    row = forecast(workload, cluster, len(seconds), exchange, compressor)
    own, *others = alternatives(workload, cluster, row, recipe.synchrony, seconds)
    possible = [
        mode
        for mode in others
        if not is_refused(replace(recipe, synchrony=replace(recipe.synchrony, **mode.synchrony)))
    ]
    better = [mode for mode in possible if mode.gain >= MIN_GAIN]
    better.sort(key=lambda mode: mode.gain, reverse=True)
    start = f"planned with these ranks' own times on {cluster.name}"
    if not better:
        return f"{start}, no mode is 5 % faster than {own.words}"
    said = ", ".join(f"{mode.words} ({mode.gain:.2f} times)" for mode in better[:MAX_MODES])
    return f"{start}, faster than {own.words}: {said}; accuracy is not predicted"


def sentence(slow: Slow, own_part: str = "its own part of a step takes") -> str:
    """Describe a slow rank; `own_part` is the text for a rank that computes slowly."""
    what = (
        f"computes longer than the others: {own_part}"
        if slow.cause == "computes"
        else "has a slow link: round trips with it take"
    )
    return (
        f"rank {slow.rank} {what} {ms(slow.own_s)}, against {ms(slow.others_s)} "
        f"({slow.factor:.2f} times; p = {slow.p_value:.2g}, n = {slow.samples})"
    )


Scored = Score | ModeScore | ParallelScore


@dataclass(frozen=True, repr=False)
class Explained(Answer):
    """The parts of each rank's time."""

    explanation: Explanation | ServedExplanation
    """The times of ranks, and those that are slow."""
    lines: list[str]
    """The lines below the tables."""
    score: Scored | None = None
    """The run's forecast against what was measured, if it has one."""
    elsewhere: list[str] | None = None
    """Lines on ranks whose times are in other folders; None for traces."""
    parts: dict[str, Any] | None = None
    """The measured parts of a step; only for traces."""

    def to_dict(self) -> dict[str, Any]:
        """Return the times, and the score of the forecast; for traces, the parts of a step."""
        record = dataclasses.asdict(self.explanation)
        if self.parts is not None:
            return {**record, "parts": self.parts}
        record["elsewhere"] = self.elsewhere
        record["score"] = None if self.score is None else dataclasses.asdict(self.score)
        return record

    def _parts(self) -> Iterator[RenderableType]:
        if isinstance(self.explanation, Explanation):
            yield _table(self.explanation)
        else:
            yield served_table(self.explanation)
        if isinstance(self.score, Score):
            yield _forecast(self.score)
        yield from self.lines


@from_script
def explain(run: str | Path | Sequence[str | Path], *, trust_code: bool = False) -> Explained:
    """Explain where the time of each rank of a run went, finished or not.

    Args:
        run: A run's folder, or traces of torch's profiler, one of each rank.
        trust_code: Run code that the folder names, to plan other modes of synchrony.

    Raises: RecipeError for a wrong argument; RunError for a folder without timings, or a trace that
    cannot be read.
    """
    paths = paths_of("run", run)
    if not paths:
        raise RecipeError("run is empty; expected a run's folder, or paths of traces")
    if is_trace(paths[0]):
        return _explain_traces(paths)
    if len(paths) > 1:
        raise RecipeError(f"explain takes one run folder, or traces; found {len(paths)} paths")
    return _explain_folder(paths[0], trust_code)


def _explain_folder(folder: Path, trust_code: bool) -> Explained:
    timings: Rows = require_timings(folder)
    changed = 0
    served = explain_served(folder, timings)
    if served is None and (folder / "result.json").is_file():
        changed = last_change(timings)
        timings = later_rows(timings, changed)
    in_rounds = recorded_section(folder, "synchrony").get("mode") == LOCAL
    explained = served or explain_rows(
        timings, later_rows(read_trips(folder), changed), in_rounds, row_of(folder)
    )
    scored: Scored | None = score_mode(folder, timings) or score_parallel(folder, timings)
    if isinstance(explained, Explanation):
        scored = scored or score(folder, timings, explained)
        said = [*_change(timings, changed), *(local_lines(folder, timings) if in_rounds else [])]
        said += lines(explained)
    else:
        said = served_lines(explained)
    said += overload_lines(overloaded(timings))
    shares = shares_of(timings) if in_rounds else None
    said += _advice(folder, explained, shares, trust_code)
    said += scored.lines if scored is not None else []
    said += noise_lines(folder)
    others = list(elsewhere(folder, timings))
    said += [*others, *_fault(folder)]
    return Explained(explained, said, scored, others)


def _change(timings: Rows, changed: int) -> list[str]:
    if not changed:
        return []
    return [
        f"{len(timings)} ranks made the steps after {changed:,}, and others those before, which "
        "are left out here"
    ]


MAX_IDLE = 0.2
"""Share of the time that ranks idle with a server, above which other modes are planned."""


def _advice(
    folder: Path,
    explained: Explanation | ServedExplanation,
    shares: RankShares | None,
    trust_code: bool,
) -> list[str]:
    """Return lines on other modes, if a rank is slow or many idle. `shares` is for local steps."""
    is_worth_it = any(slow.cause == "computes" for slow in explained.slow)
    seconds = shares.seconds if shares is not None else []
    if isinstance(explained, ServedExplanation):
        idle = [rank.idle or 0.0 for rank in explained.ranks]
        is_worth_it |= sum(idle) > MAX_IDLE * len(idle)
        seconds = [rank.seconds for rank in explained.ranks]
    if not is_worth_it or not seconds:
        return []
    return advice(folder, seconds, trust_code)


def _fault(folder: Path) -> list[str]:
    if not (folder / NAME).is_file():
        return []
    fault = read_run_file(folder, NAME)
    faults = [fault, *fault.get("earlier", [])]
    if (folder / "result.json").is_file():  # its ranks were asked to stop as a host came or left
        faults = [fault for fault in faults if fault.get("kind") != "preempted"]
    return [f"fault: {fault.get('line')} ({fault.get('then')})" for fault in faults[:1]]


def _explain_traces(paths: Sequence[Path]) -> Explained:
    timings: dict[int, list[dict[str, Any]]] = {}
    for path in paths:
        rank, rows = read_trace(path)
        if rank in timings:
            raise RunError(f"{path}: a second trace of rank {rank}; give one of each rank")
        timings[rank] = rows
    explanation = explain_rows(dict(sorted(timings.items())), {})
    parts = measured_parts(timings)
    return Explained(explanation, [*lines(explanation), *causes(parts)], parts=parts)


def lines(explanation: Explanation) -> list[str]:
    said = [sentence(slow) for slow in explanation.slow]
    if not said and not explanation.not_tested:
        said.append("no rank is slower than the noise")
    if explanation.shares is not None:
        slow = [rank.rank for rank in explanation.slow if rank.cause == "computes"]
        said += filter(None, [shares_line(explanation.shares, slow)])
    said += stage_lines(explanation.stages)
    said += _waits(explanation.ranks)
    return [*said, *(f"not tested: {reason}" for reason in explanation.not_tested)]


def _waits(ranks: Sequence[RankTimes]) -> list[str]:
    if not all(rank.waits_s for rank in ranks):
        return []
    step_s = median(rank.step_s for rank in ranks)
    seconds = {kind: median(rank.waits_s[kind] for rank in ranks) for kind in ranks[0].waits_s}
    waits = (f"for {kind} {ms(wait_s)} ({wait_s / step_s:.0%})" for kind, wait_s in seconds.items())
    return [f"split layers: in a step the median rank waits {', '.join(waits)}"]


def _table(explanation: Explanation) -> Table:
    parts = ("data", "compute", "waits for others", "update")
    table = numbers_table("rank", "steps", "step", *parts, "rest", no_wrap=False)
    for rank in explanation.ranks:
        shares = [f"{ms(rank.parts_s[p])} {rank.parts_s[p] / rank.step_s:4.0%}" for p in PARTS]
        table.add_row(
            str(rank.rank), str(rank.steps), ms(rank.step_s), *shares, ms(max(0.0, rank.rest_s))
        )
    return table


def _forecast(scored: Score) -> Table:
    """Return a table of each part's forecast and its measurement, of all ranks together."""
    headers = ("part of a step", "forecast", "low - high", "measured", "difference")
    table = numbers_table(*headers, title=f"forecast for {scored.cluster}")
    for part in (*scored.parts, scored.step):
        band = f"{part.low_s * 1e3:,.1f} - {ms(part.high_s)}"
        gap = f"{(part.measured_s - part.forecast_s) * 1e3:+,.1f} ms"
        table.add_row(title_of(part.name), ms(part.forecast_s), band, ms(part.measured_s), gap)
    return table
