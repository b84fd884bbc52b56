"""`firecaffe compare RUN RUN…`: the table of finished runs, and every word that differs."""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from firecaffe.cli.parse import Parser
from firecaffe.runs.compare import (
    Row,
    Run,
    differing_words,
    names,
    read_run,
    rows,
    weights_identical,
)

USAGE = "RUN RUN… [--json]"

NUMBERS = (
    "workers",
    "global\nbatch",
    "base\nlr",
    "steps",
    "images\n/s",
    "speedup",
    "exposed\ncomm.",
    "top-1",
)

MIN_WIDTH = 96
"""A narrower terminal breaks lines itself, which reads better than cells folded to shreds."""

PIPE_WIDTH = 10_000
"""Nothing is folded there; a table is only as wide as its cells."""


def main(argv: list[str]) -> int:
    parser = Parser(
        "compare",
        USAGE,
        "Compare finished runs: rate, speedup against the first one, accuracy, weights, and every "
        "hyperparameter that differs.",
    )
    parser.add_argument("runs", nargs="+", type=str, help="run folders; the first is the baseline")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    options = parser.parse_args(argv)
    runs = [read_run(Path(folder)) for folder in options.runs]
    if options.json:
        print(json.dumps(as_json(runs), indent=2))
        return 0
    show(runs)
    return 0


def show(runs: Sequence[Run]) -> None:
    """Prints the comparison."""
    console = Console(file=sys.stdout)
    console.width = max(console.width, MIN_WIDTH) if console.is_terminal else PIPE_WIDTH
    for part in render(runs):
        console.print(part)


def as_json(runs: Sequence[Run]) -> dict[str, Any]:
    """The same facts as `render`, unrounded."""
    return {
        "rows": [dataclasses.asdict(row) for row in rows(runs)],
        "differing": differing_words(runs),
        "identical": weights_identical(runs),
    }


def render(runs: Sequence[Run]) -> list[RenderableType]:
    """The table; then, of two runs or more, the words that differ and what is to be said of it."""
    table = rows(runs)
    parts: list[RenderableType] = [_table(table), Text()]
    if len(runs) > 1:
        words = differing_words(runs)
        parts += [_words(runs, words), Text()] if words else [Text("no hyperparameter differs")]
        parts.append(Text(_identity(table, weights_identical(runs))))
    if any(row.other_work for row in table):
        parts.append(Text(_warning(table), style="yellow"))
    return parts


def _table(table: Sequence[Row]) -> Table:
    shown = _empty_table()
    for header in ("run", "exchange"):
        shown.add_column(header, overflow="fold")
    for header in NUMBERS:
        shown.add_column(header, justify="right", overflow="fold")
    shown.add_column("weights", no_wrap=True)
    for row in table:
        speedup = "-" if row.speedup is None else f"{row.speedup:.2f}"
        shown.add_row(
            Text(row.run),
            row.exchange,
            str(row.workers),
            f"{row.global_batch_size:,}",
            f"{row.base_lr:g}",
            f"{row.steps:,}",
            f"{row.images_per_s:,.0f}",
            f"{speedup}*" if row.other_work else speedup,
            f"{row.exposed_communication:.1%}",
            f"{row.top1:.2%}",
            row.weights_sha256[:12],
        )
    return shown


def _words(runs: Sequence[Run], words: dict[str, list[Any]]) -> Table:
    """One row per word; values that are not the first run's are bold."""
    shown = _empty_table()
    shown.add_column("differs", overflow="fold")
    for name in names(runs):
        shown.add_column(Text(name), overflow="fold")
    for word, values in words.items():
        cells = [Text(_show(v), style="bold" if v != values[0] else "") for v in values]
        shown.add_row(word, *cells)
    return shown


def _empty_table() -> Table:
    return Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))


def _show(value: Any) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return str(value)


def _identity(table: Sequence[Row], identical: bool) -> str:
    if identical:
        return f"weights identical in all {len(table)} runs: {table[0].weights_sha256[:12]}"
    different = len({row.weights_sha256 for row in table})
    return f"weights not identical: {different} different ones in {len(table)} runs"


def _warning(table: Sequence[Row]) -> str:
    unlike = "; ".join(f"{r.run} in {', '.join(r.other_work)}" for r in table if r.other_work)
    return (
        f"* not the same work as {table[0].run}: {unlike}. "
        "A speedup between them compares unlike things."
    )
