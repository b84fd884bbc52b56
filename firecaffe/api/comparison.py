"""`firecaffe.compare`: finished runs side by side, and the words of recipes that differ."""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from firecaffe.api.answer import PLAIN, Answer, check_picture
from firecaffe.api.argument_checks import check_number, path_of, paths_of, wrong
from firecaffe.api.compare_groups import page, render_groups
from firecaffe.cluster.from_script import from_script
from firecaffe.errors import RecipeError
from firecaffe.files import finite, write_atomically
from firecaffe.resume_advice import option
from firecaffe.runs.checklist import Item, checklist
from firecaffe.runs.measure import Measure
from firecaffe.runs.run_table import (
    RunRow,
    TableRun,
    differing_words,
    doubts,
    names,
    other_measures,
    partly_timed,
    read_run,
    rows,
    weights_identical,
)
from firecaffe.runs.seed_groups import GroupRow, differing, group_rows, group_runs
from firecaffe.user_code import shown

NUMBER_COLUMNS = (
    *("workers", "global\nbatch", "base\nlr", "steps", "samples\n/s"),
    *("speedup", "exposed\ncomm."),
)

MIN_WIDTH_OF_RUNS = 96
"""Least width. A narrower terminal breaks the lines, which reads better than folded cells."""

PIPE_WIDTH = 10_000
"""Width without a terminal, where nothing is folded. A table is as wide as its cells."""


@dataclass(frozen=True, repr=False)
class Compared(Answer):
    """Runs side by side, each against the first."""

    runs: list[TableRun]
    """The runs, the baseline first."""
    allow_unequal: bool = False
    """Whether runs of different work get a speedup, too."""

    width, least_width = PIPE_WIDTH, MIN_WIDTH_OF_RUNS

    def to_dict(self) -> dict[str, Any]:
        """Return a row for each run, the words that differ, and whether weights are identical."""
        record: dict[str, Any] = finite(
            {
                "rows": [dataclasses.asdict(row) for row in rows(self.runs, self.allow_unequal)],
                "differing": differing_words(self.runs),
                "identical": weights_identical(self.runs),
                "doubts": doubts(self.runs),
            }
        )
        return record

    def _parts(self) -> Iterator[RenderableType]:
        yield from render(self.runs, self.allow_unequal)


@dataclass(frozen=True, repr=False)
class GroupsCompared(Answer):
    """Groups of runs that differ in their seeds alone, each against the first."""

    rows: list[GroupRow]
    """A row for each group."""
    items: list[Item]
    """The checklist of a fair comparison."""
    differing: dict[str, list[Any]]
    """The words of recipes that differ, with each group's value."""
    target: float | None
    """The value of the metric that is timed, in units of records."""
    remarks: list[str]
    """Lines about the runs."""

    width, least_width = PIPE_WIDTH, MIN_WIDTH_OF_RUNS

    def to_dict(self) -> dict[str, Any]:
        """Return a row for each group, and the checklist."""
        # An interval of a single run has infinities.
        groups = [finite(dataclasses.asdict(row)) for row in self.rows]
        return {"groups": groups, "checklist": [dataclasses.asdict(item) for item in self.items]}

    def _parts(self) -> Iterator[RenderableType]:
        yield from render_groups(self.rows, self.items, self.differing, self.target)
        yield from map(Text, self.remarks)


@from_script
def compare(
    runs: str | Path | Sequence[str | Path],
    *,
    baseline: str | Path = "",
    by: Literal["run", "recipe"] = "run",
    target: float | None = None,
    band: float | None = None,
    allow_unequal: bool = False,
    html: str | Path = "",
    overwrite: bool = False,
) -> Compared | GroupsCompared:
    """Compare finished runs: rate, speedup, accuracy, weights, and each word that differs.

    Args:
        runs: Run folders; the first is the baseline.
        baseline: Another baseline than the first.
        by: "run", or "recipe" for groups over seeds.
        target: With groups: the time to this value of the task's metric; shares in per cent.
        band: With groups: points of the metric that count as no difference; by default 0.3 for a
            share, else 1 in 100.
        allow_unequal: Give speedups between runs of different work, too; they are marked.
        html: A file for a page with the table, and the curves of each run, one or several.
        overwrite: Replace the file of `html` if it exists.

    Raises: RecipeError for a wrong argument; RunError for a folder that is not a finished run's.
    """
    if by not in ("run", "recipe"):
        raise wrong("by", shown(by), "run or recipe")
    is_grouped = by == "recipe" or bool(html)
    for word, value in (("target", target), ("band", band)):
        if value is not None and not is_grouped:
            raise RecipeError(f"{option(word)} goes with {option('by')} recipe or {option('html')}")
    check_picture(option("html"), str(html), overwrite, (".html",))
    several = [read_run(folder) for folder in _folders(runs, baseline)]
    if not is_grouped:
        return Compared(several, allow_unequal)
    goal, same = _typed(target, band, several[0].measure)
    groups = group_runs(several)
    table = group_rows(groups, goal, allow_unequal, same)
    items = checklist(groups, table, same)
    if html:
        write_atomically(Path(html), page(groups, table, items, goal))
    if by == "run":
        return Compared(several, allow_unequal)
    remarks = [*_doubts(several), *other_measures(several), *partly_timed(several)]
    return GroupsCompared(list(table), list(items), differing(groups), goal, remarks)


def _folders(runs: Any, baseline: str | Path) -> list[Path]:
    folders = paths_of("runs", runs)
    if not folders:
        raise RecipeError("runs is empty; expected the folders of runs")
    if baseline:
        first = path_of("baseline", baseline)
        folders = [first, *(folder for folder in folders if folder.resolve() != first.resolve())]
    for folder, times in Counter(folder.resolve() for folder in folders).items():
        if times > 1:
            raise RecipeError(f"{folder} is given {times} times; a run counts once")
    return folders


def _typed(
    target: float | None, band: float | None, measure: Measure
) -> tuple[float | None, float | None]:
    """Convert --target and --band to the units of records. Raises RecipeError if out of range."""
    words, scale = measure.words, measure.scale
    for word, value in (("target", target), ("band", band)):
        if value is not None:
            check_number(word, value)
    if target is not None and measure.is_share and not 1 <= target < 100:
        kind = f"a {words} in per cent, from 1 up to 100"
        raise RecipeError(f"{option('target')} is {target:g}; it is {kind}")
    if band is not None and not 0 <= band <= (100 if measure.is_share else inf):
        kind = (
            f"points of {words}, from 0 up to 100" if measure.is_share else f"of {words}, 0 or more"
        )
        raise RecipeError(f"{option('band')} is {band:g}; it is {kind}")
    return (None if target is None else target / scale, None if band is None else band / scale)


def render(runs: Sequence[TableRun], allow_unequal: bool = False) -> list[RenderableType]:
    """Return the table and, for two or more runs, the fields that differ and remarks."""
    table = rows(runs, allow_unequal)
    parts: list[RenderableType] = [_table(table), Text()]
    if len(runs) > 1:
        words = differing_words(runs)
        parts += [_words(runs, words), Text()] if words else [Text("no hyperparameter differs")]
        parts.append(Text(_identity(table, weights_identical(runs))))
    if any(row.other_work for row in table):
        parts.append(Text(_warning(table), style="yellow"))
    if any(row.speedup is not None for row in table[1:]):
        parts.append(
            Text(f"speedups are of single runs, without intervals; {option('by')} recipe has them")
        )
    for row in table:
        if row.failure:
            parts.append(Text(f"{row.run} has failed: {row.failure}", style="yellow"))
    return [*parts, *map(Text, [*other_measures(runs), *partly_timed(runs), *_doubts(runs)])]


def _doubts(runs: Sequence[TableRun]) -> list[str]:
    return [f"{name}: {doubt}" for name, own in doubts(runs).items() for doubt in own]


def _table(table: Sequence[RunRow]) -> Table:
    shown = Table(box=SIMPLE_HEAD, **PLAIN)
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


def _words(runs: Sequence[TableRun], words: dict[str, list[Any]]) -> Table:
    shown = Table(box=SIMPLE_HEAD, **PLAIN)
    shown.add_column("differs", overflow="fold")
    for name in names(runs):
        shown.add_column(Text(name), overflow="fold")
    for word, values in words.items():
        cells = [Text(_show(v), style="bold" if v != values[0] else "") for v in values]
        shown.add_row(word, *cells)
    return shown


def _show(value: Any) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return str(value)


def _identity(table: Sequence[RunRow], identical: bool) -> str:
    if identical:
        return f"weights identical in all {len(table)} runs: {table[0].weights_sha256[:12]}"
    different = len({row.weights_sha256 for row in table})
    return f"weights not identical: {different} different ones in {len(table)} runs"


def _warning(table: Sequence[RunRow]) -> str:
    unlike = "; ".join(f"{r.run} in {', '.join(r.other_work)}" for r in table if r.other_work)
    if all(row.speedup is None for row in table if row.other_work):
        return (
            f"no speedup over {table[0].run}, for it is not the same work: {unlike}. "
            f"{option('allow_unequal')} gives it all the same."
        )
    return (
        f"* not the same work as {table[0].run}: {unlike}. "
        "A speedup between them compares unlike things."
    )
