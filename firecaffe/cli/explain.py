"""`firecaffe explain RUN`: where the time went, who is slow, and how good the forecast was."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from firecaffe.cli.console import make_console
from firecaffe.cli.options.explain import make_parser
from firecaffe.errors import RecipeError, RunError
from firecaffe.runs.explain import PARTS, Explanation, Slow, explain, explain_rows, read_rows
from firecaffe.runs.fault import NAME
from firecaffe.runs.folder import read_run_file
from firecaffe.runs.kineto import is_trace, read_trace
from firecaffe.runs.score import Score, causes, measured_parts, score
from firecaffe.runs.shares import shares_line

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
    explanation = explain(folder)
    scored = score(folder, read_rows(folder, "rank-*.jsonl"), explanation)
    if options.json:
        words = dataclasses.asdict(explanation)
        words["score"] = None if scored is None else dataclasses.asdict(scored)
        print(json.dumps(words, indent=2))
        return 0
    console = make_console()
    console.print(_table(explanation))
    if scored is not None:
        console.print(_parts(scored))
    for line in [*lines(explanation), *(scored.lines if scored is not None else [])]:
        console.print(line, markup=False, soft_wrap=True)
    if (folder / NAME).is_file():
        fault = read_run_file(folder, NAME)
        console.print(f"fault: {fault.get('line')} ({fault.get('then')})", markup=False)
    return 0


def _explain_traces(paths: Sequence[Path], as_json: bool) -> int:
    """Someone else's training, from the traces of one rank or of several."""
    timings: dict[int, list[dict[str, Any]]] = {}
    for path in paths:
        rank, rows = read_trace(path)
        if rank in timings:
            raise RunError(f"{path}: a second trace of rank {rank}; give one of each rank")
        timings[rank] = rows
    explanation = explain_rows(dict(sorted(timings.items())), {}, paths[0])
    parts = measured_parts(timings)
    if as_json:
        print(json.dumps({**dataclasses.asdict(explanation), "parts": parts}, indent=2))
        return 0
    console = make_console()
    console.print(_table(explanation))
    for line in [*lines(explanation), *causes(parts)]:
        console.print(line, markup=False, soft_wrap=True)
    return 0


def lines(explanation: Explanation) -> list[str]:
    """What is to be said of the table, one thing a line."""
    said = [_sentence(slow) for slow in explanation.slow]
    if not said and not explanation.not_tested:
        said.append("no rank is shown to be slow: none beyond the noise")
    if explanation.shares is not None:
        slow = [each.rank for each in explanation.slow if each.cause == "computes"]
        said += filter(None, [shares_line(explanation.shares, slow)])
    return [*said, *(f"not tested: {reason}" for reason in explanation.not_tested)]


def _sentence(slow: Slow) -> str:
    what = (
        "computes longer than the others: its own part of a step takes"
        if slow.cause == "computes"
        else "has a slow link: round trips with it take"
    )
    return (
        f"rank {slow.rank} {what} {_ms(slow.own_s)}, against {_ms(slow.others_s)} "
        f"({slow.factor:.2f} times; p = {slow.p_value:.2g}, n = {slow.samples})"
    )


def _table(explanation: Explanation) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for header in ("rank", "steps", "step", *HEADERS.values(), "rest"):
        table.add_column(header, justify="right")
    for rank in explanation.ranks:
        shares = [f"{_ms(rank.parts_s[p])} {rank.parts_s[p] / rank.step_s:4.0%}" for p in PARTS]
        table.add_row(
            str(rank.rank), str(rank.steps), _ms(rank.step_s), *shares, _ms(max(0.0, rank.rest_s))
        )
    return table


def _parts(scored: Score) -> Table:
    """The forecast's parts beside the measured ones: of all ranks together."""
    table = Table(box=SIMPLE_HEAD, title=f"forecast for {scored.cluster}")
    for header in ("part of a step", "forecast", "low - high", "measured", "difference"):
        table.add_column(header, justify="right", no_wrap=True)
    for part in (*scored.parts, scored.step):
        band = f"{part.low_s * 1e3:,.1f} - {_ms(part.high_s)}"
        gap = f"{(part.measured_s - part.forecast_s) * 1e3:+,.1f} ms"
        name = part.name.removesuffix("_s").replace("exchange", "exposed exchange")
        table.add_row(name, _ms(part.forecast_s), band, _ms(part.measured_s), gap)
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"
