"""`firecaffe compare RUN [RUN…]`: a table of finished runs and of the fields that differ."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Sequence
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from firecaffe.cli.arguments import Parser
from firecaffe.cli.picture import check_picture
from firecaffe.errors import RecipeError
from firecaffe.files import write_atomically

if TYPE_CHECKING:
    from firecaffe.runs.measure import Measure
    from firecaffe.runs.run_table import Row, Run

USAGE = (
    "RUN [RUN…] [--baseline RUN] [--by recipe] [--target VALUE] [--band POINTS] "
    "[--html FILE [--overwrite]] [--allow-unequal] [--json]"
)


def make_parser() -> Parser:
    parser = Parser(
        "compare",
        USAGE,
        "Compare finished runs: rate, speedup against the first one, accuracy, weights, and every "
        "hyperparameter that differs.",
    )
    add = parser.add
    add(
        "runs",
        nargs="+",
        type=str,
        help="run folders; the first is the baseline; --html draws the curves of one alone, too",
    )
    add("--baseline", type=str, default="", metavar="RUN", help="another than the first")
    add("--by", choices=["run", "recipe"], default="run", help="recipe: groups over seeds")
    add(
        "--target",
        type=float,
        default=None,
        metavar="VALUE",
        help="with --by recipe: time to this value of the task's metric; shares in per cent",
    )
    add(
        "--band",
        type=float,
        default=None,
        metavar="POINTS",
        help="with --by recipe: of the metric, that are no difference; 0.3 of shares, else 1 in "
        "100",
    )
    add("--allow-unequal", action="store_true", help="speedups between runs of other work, marked")
    add(
        "--html",
        type=str,
        default="",
        metavar="FILE",
        help="a page of the groups over seeds, with curves, in one file",
    )
    parser.add_overwrite()
    add("--json", action="store_true", help="print one JSON object instead")
    return parser


NUMBER_COLUMNS = (
    "workers",
    "global\nbatch",
    "base\nlr",
    "steps",
    "samples\n/s",
    "speedup",
    "exposed\ncomm.",
)

MIN_WIDTH_OF_RUNS = 96
"""Least width. A narrower terminal breaks the lines, which reads better than folded cells."""

PIPE_WIDTH = 10_000
"""Width without a terminal, where nothing is folded. A table is as wide as its cells."""


def main(argv: list[str]) -> int:
    from firecaffe.cli.compare_groups import as_json as as_group_json
    from firecaffe.cli.compare_groups import render_groups
    from firecaffe.cli.compare_page import page
    from firecaffe.runs.checklist import checklist
    from firecaffe.runs.run_table import other_measures, read_run
    from firecaffe.runs.seed_groups import differing, group_rows, group_runs

    options = make_parser().parse_args(argv)
    is_grouped = options.by == "recipe" or bool(options.html)
    for word in ("target", "band"):
        if getattr(options, word) is not None and not is_grouped:
            raise RecipeError(f"--{word} goes with --by recipe or --html")
    check_picture("--html", options.html, options.overwrite, ())
    folders = [Path(folder) for folder in options.runs]
    if options.baseline:
        first = Path(options.baseline)
        folders = [first, *(folder for folder in folders if folder.resolve() != first.resolve())]
    for folder, times in Counter(folder.resolve() for folder in folders).items():
        if times > 1:
            raise RecipeError(f"{folder} is given {times} times; a run counts once")
    runs = [read_run(folder) for folder in folders]
    if is_grouped:
        target, band = _typed(options.target, options.band, runs[0].measure)
        groups = group_runs(runs)
        table = group_rows(groups, target, options.allow_unequal, band)
        items = checklist(groups, table, band)
        if options.html:
            write_atomically(Path(options.html), page(groups, table, items, target))
        if options.by == "recipe":
            if options.json:
                print(as_group_json(table, items))
            else:
                shown = render_groups(table, items, differing(groups), target)
                _print([*shown, *_doubts(runs), *map(Text, other_measures(runs))])
            return 0
    unequal = {"allow_unequal": options.allow_unequal}
    if options.json:
        print(json.dumps(as_json(runs, **unequal), indent=2))
        return 0
    show(runs, **unequal)
    return 0


def _typed(
    target: float | None, band: float | None, measure: Measure
) -> tuple[float | None, float | None]:
    """Convert --target and --band to the units of records. Raises RecipeError if out of range."""
    words, scale = measure.words, measure.scale
    if target is not None and not (
        isfinite(target) and (not measure.is_share or 1 <= target < 100)
    ):
        kind = (
            f"a {words} in per cent, from 1 up to 100"
            if measure.is_share
            else f"a value of {words}"
        )
        raise RecipeError(f"--target is {target:g}; it is {kind}")
    if band is not None and not (0 <= band < inf and (not measure.is_share or band <= 100)):
        kind = (
            f"points of {words}, from 0 up to 100" if measure.is_share else f"of {words}, 0 or more"
        )
        raise RecipeError(f"--band is {band:g}; it is {kind}")
    return (
        None if target is None else target / scale,
        None if band is None else band / scale,
    )


def show(runs: Sequence[Run], allow_unequal: bool = False) -> None:
    _print(render(runs, allow_unequal))


def _print(parts: Sequence[RenderableType]) -> None:
    console = Console(file=sys.stdout)
    console.width = max(console.width, MIN_WIDTH_OF_RUNS) if console.is_terminal else PIPE_WIDTH
    for part in parts:
        console.print(part)


def as_json(runs: Sequence[Run], allow_unequal: bool = False) -> dict[str, Any]:
    from firecaffe.runs.run_table import differing_words, doubts, rows, weights_identical

    return {
        "rows": [dataclasses.asdict(row) for row in rows(runs, allow_unequal)],
        "differing": differing_words(runs),
        "identical": weights_identical(runs),
        "doubts": doubts(runs),
    }


def render(runs: Sequence[Run], allow_unequal: bool = False) -> list[RenderableType]:
    """Return the table and, for two or more runs, the fields that differ and remarks."""
    from firecaffe.runs.run_table import differing_words, other_measures, rows, weights_identical

    table = rows(runs, allow_unequal)
    parts: list[RenderableType] = [_table(table), Text()]
    if len(runs) > 1:
        words = differing_words(runs)
        parts += [_words(runs, words), Text()] if words else [Text("no hyperparameter differs")]
        parts.append(Text(_identity(table, weights_identical(runs))))
    if any(row.other_work for row in table):
        parts.append(Text(_warning(table), style="yellow"))
    if any(row.speedup is not None for row in table[1:]):
        parts.append(Text("speedups are of single runs, without intervals; --by recipe has them"))
    for row in table:
        if row.failure:
            parts.append(Text(f"{row.run} has failed: {row.failure}", style="yellow"))
    return [*parts, *map(Text, other_measures(runs)), *_doubts(runs)]


def _doubts(runs: Sequence[Run]) -> list[RenderableType]:
    from firecaffe.runs.run_table import doubts

    return [Text(f"{name}: {doubt}") for name, own in doubts(runs).items() for doubt in own]


def _table(table: Sequence[Row]) -> Table:
    shown = _empty_table()
    for header in ("run", "exchange"):
        shown.add_column(header, overflow="fold")
    for header in (*NUMBER_COLUMNS, table[0].measure.words):
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
            f"{speedup}*" if row.other_work and row.speedup is not None else speedup,
            f"{row.exposed_communication:.1%}",
            row.measure.shown(row.value) if row.measure == table[0].measure else "-",
            row.weights_sha256[:12],
        )
    return shown


def _words(runs: Sequence[Run], words: dict[str, list[Any]]) -> Table:
    from firecaffe.runs.run_table import names

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
    if all(row.speedup is None for row in table if row.other_work):
        return (
            f"no speedup over {table[0].run}, for it is not the same work: {unlike}. "
            "--allow-unequal gives it all the same."
        )
    return (
        f"* not the same work as {table[0].run}: {unlike}. "
        "A speedup between them compares unlike things."
    )
