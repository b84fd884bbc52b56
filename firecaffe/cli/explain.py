"""`firecaffe explain RUN`: where the time went, which ranks are slow, the forecast's error."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from firecaffe.cli.console import make_console
from firecaffe.cli.explain_served import show_served
from firecaffe.cli.explain_stages import stage_lines
from firecaffe.cli.explain_words import ms, sentence
from firecaffe.cli.options.explain import make_parser
from firecaffe.errors import RecipeError, RunError
from firecaffe.runs.explain_local import is_local, local_lines
from firecaffe.runs.explain_served import ServedExplanation, explain_served
from firecaffe.runs.fault import NAME
from firecaffe.runs.kineto import is_trace, read_trace
from firecaffe.runs.rank_shares import RankShares, shares_line, shares_of
from firecaffe.runs.rank_times import (
    PARTS,
    Explanation,
    RankTimes,
    explain,
    explain_rows,
    read_timings,
)
from firecaffe.runs.run_folder import elsewhere, read_run_file
from firecaffe.runs.score import (
    ModeScore,
    ParallelScore,
    Score,
    causes,
    measured_parts,
    score,
    score_mode,
    score_parallel,
)

HEADERS = {
    "data_s": "data",
    "compute_s": "compute",
    "exposed_communication_s": "waits for others",
    "update_s": "update",
}


def main(argv: list[str]) -> int:
    options = make_parser().parse_args(argv)
    paths = [Path(path) for path in options.run]
    if is_trace(paths[0]):
        return _explain_traces(paths, options.json)
    if len(paths) > 1:
        raise RecipeError(f"explain takes one run folder, or traces; found {len(paths)} paths")
    folder = paths[0]
    timings = read_timings(folder)
    in_rounds = is_local(folder)
    explained = explain_served(folder, timings) or explain(folder, in_rounds)
    scored: Score | ModeScore | ParallelScore | None = score_mode(folder, timings)
    if scored is None:
        scored = score_parallel(folder, timings)
    if scored is None and isinstance(explained, Explanation):
        scored = score(folder, timings, explained)
    if options.json:
        words = dataclasses.asdict(explained)
        words["elsewhere"] = elsewhere(folder, timings)
        words["score"] = None if scored is None else dataclasses.asdict(scored)
        print(json.dumps(words, indent=2))
        return 0
    console = make_console()
    if isinstance(explained, Explanation):
        console.print(_table(explained))
        said = [*(local_lines(folder, timings) if in_rounds else []), *lines(explained)]
    else:
        said = show_served(console, explained)
    shares = shares_of(timings) if in_rounds else None
    said += _advice(folder, explained, shares, options.trust_code)
    if isinstance(scored, Score):
        console.print(_parts(scored))
    said += scored.lines if scored is not None else []
    _say(console, [*said, *elsewhere(folder, timings), *_fault(folder)])
    return 0


MOST_IDLE = 0.2
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
        is_worth_it |= sum(idle) > MOST_IDLE * len(idle)
        seconds = [rank.seconds for rank in explained.ranks]
    if not is_worth_it or not seconds:
        return []
    from firecaffe.cli.explain_advice import advice  # this import loads torch

    return advice(folder, seconds, trust_code)


def _say(console: Console, lines: Sequence[str]) -> None:
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def _fault(folder: Path) -> list[str]:
    if not (folder / NAME).is_file():
        return []
    fault = read_run_file(folder, NAME)
    return [f"fault: {fault.get('line')} ({fault.get('then')})"]


def _explain_traces(paths: Sequence[Path], as_json: bool) -> int:
    timings: dict[int, list[dict[str, Any]]] = {}
    for path in paths:
        rank, rows = read_trace(path)
        if rank in timings:
            raise RunError(f"{path}: a second trace of rank {rank}; give one of each rank")
        timings[rank] = rows
    explanation = explain_rows(dict(sorted(timings.items())), {})
    parts = measured_parts(timings)
    if as_json:
        print(json.dumps({**dataclasses.asdict(explanation), "parts": parts}, indent=2))
        return 0
    console = make_console()
    console.print(_table(explanation))
    _say(console, [*lines(explanation), *causes(parts)])
    return 0


def lines(explanation: Explanation) -> list[str]:
    said = [sentence(slow) for slow in explanation.slow]
    if not said and not explanation.not_tested:
        said.append("no rank is slower than the noise")
    if explanation.shares is not None:
        slow = [each.rank for each in explanation.slow if each.cause == "computes"]
        said += filter(None, [shares_line(explanation.shares, slow)])
    said += stage_lines(explanation.stages)
    said += _waits(explanation.ranks)
    return [*said, *(f"not tested: {reason}" for reason in explanation.not_tested)]


def _waits(ranks: Sequence[RankTimes]) -> list[str]:
    if not all(rank.waits_s for rank in ranks):
        return []
    step_s = median(rank.step_s for rank in ranks)
    seconds = {kind: median(rank.waits_s[kind] for rank in ranks) for kind in ranks[0].waits_s}
    words = (f"for {kind} {ms(each)} ({each / step_s:.0%})" for kind, each in seconds.items())
    return [f"split layers: in a step the median rank waits {', '.join(words)}"]


def _table(explanation: Explanation) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for header in ("rank", "steps", "step", *HEADERS.values(), "rest"):
        table.add_column(header, justify="right")
    for rank in explanation.ranks:
        shares = [f"{ms(rank.parts_s[p])} {rank.parts_s[p] / rank.step_s:4.0%}" for p in PARTS]
        table.add_row(
            str(rank.rank), str(rank.steps), ms(rank.step_s), *shares, ms(max(0.0, rank.rest_s))
        )
    return table


def _parts(scored: Score) -> Table:
    """Return a table of each part's forecast and its measurement, of all ranks together."""
    table = Table(box=SIMPLE_HEAD, title=f"forecast for {scored.cluster}")
    for header in ("part of a step", "forecast", "low - high", "measured", "difference"):
        table.add_column(header, justify="right", no_wrap=True)
    for part in (*scored.parts, scored.step):
        band = f"{part.low_s * 1e3:,.1f} - {ms(part.high_s)}"
        gap = f"{(part.measured_s - part.forecast_s) * 1e3:+,.1f} ms"
        name = part.name.removesuffix("_s").replace("exchange", "exposed exchange")
        table.add_row(name, ms(part.forecast_s), band, ms(part.measured_s), gap)
    return table
