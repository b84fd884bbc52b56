"""`firecaffe compare --by recipe`: groups over seeds, in the form of FireCaffe's table 2."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from math import inf, isfinite
from statistics import median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from firecaffe.files import finite
from firecaffe.runs.checklist import Item
from firecaffe.runs.measure import Measure, in_words, of_difference, of_mean
from firecaffe.runs.run_table import OWN_CODE
from firecaffe.runs.seed_groups import GroupRow, letters
from firecaffe.runs.statistics import MOST_RUNS, UNDECIDED, Difference, Mean, Ratio
from firecaffe.synchrony.config import EVERY_STEP

MOST_OTHERS = 2
"""Most further metrics in a table, next to the one that runs are judged by."""


def headers(rows: Sequence[GroupRow]) -> list[str]:
    metrics = [rows[0].measure.words, *map(in_words, _others(rows[0]))]
    known = ["hardware", "net", "epochs", "batch", "initial\nlr", "time", "speedup"]
    return [*known, *metrics, "seeds", *_of_modes(rows)]


def _of_modes(rows: Sequence[GroupRow]) -> dict[str, Callable[[GroupRow], str]]:
    if all(row.mode == EVERY_STEP for row in rows):
        return {}
    columns: dict[str, Callable[[GroupRow], str]] = {
        "mode": lambda row: row.mode,
        "test loss": lambda row: _plain(row.test_loss),
    }
    if any(row.staleness is not None for row in rows):
        columns["staleness"] = lambda row: _plain(row.staleness)
    if any(row.given_up for row in rows):
        columns["given up"] = lambda row: f"{row.given_up:.1%}"
    if any(row.sent_bytes for row in rows):
        columns["sent"] = lambda row: _bytes(row.sent_bytes)
    return columns


def _plain(mean: Mean | None) -> str:
    if mean is None:
        return "-"
    return f"{mean.value:.4g}" + (f" ± {mean.half:.2g}" if isfinite(mean.half) else "")


def _bytes(count: float | None) -> str:
    return "-" if count is None else f"{count / 1e6:,.4g} MB"


def _others(first: GroupRow) -> list[str]:
    return list(first.others)[:MOST_OTHERS]


def as_dict(rows: Sequence[GroupRow], items: Sequence[Item]) -> dict[str, Any]:
    """Return groups with None for infinities, which an interval of a single run has."""
    return {
        "groups": [finite(dataclasses.asdict(row)) for row in rows],
        "checklist": [dataclasses.asdict(item) for item in items],
    }


def render_groups(
    rows: Sequence[GroupRow],
    items: Sequence[Item],
    words: Mapping[str, Sequence[Any]],
    target: float | None,
) -> list[RenderableType]:
    """Return the table and lines below it. `words` are the differing fields' values by group."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    title = "time to target" if target is not None else "time"
    for header in ("", *headers(rows)):
        name = title if header == "time" else header
        table.add_column(name, justify="left" if header in ("", "hardware", "net") else "right")
    for letter, row in zip(letters(len(rows)), rows, strict=True):
        table.add_row(letter, *cells(row, rows))
    differ = [
        f"{word}: {', '.join(f'{a} {b}' for a, b in zip(letters(len(rows)), values, strict=True))}"
        for word, values in shown_words(words).items()
    ]
    lines = [*differ, *([""] if differ else []), *verdicts(rows), "", *_checks(items)]
    return [table, Text(), *(Text(line) for line in [*lines, "", *_sources(rows)])]


DIGESTS = ("environment.source", OWN_CODE)


def shown_words(words: Mapping[str, Sequence[Any]]) -> dict[str, list[str]]:
    """Return values as a table shows them: digests shortened, `-` for a missing one."""
    return {
        word: [_word(value)[:12] if word.startswith(DIGESTS) else _word(value) for value in values]
        for word, values in words.items()
    }


def _word(value: Any) -> str:
    return "-" if value is None or value == "" else str(value)


def cells(row: GroupRow, rows: Sequence[GroupRow]) -> list[str]:
    first, has_failed = rows[0], bool(row.failure)
    own = of_mean(row.value, row.measure, has_failed) if row.measure == first.measure else "-"
    speedup = "-" if row.speedup is None else ratio(row.speedup)
    return [
        row.hardware,
        row.net,
        "?" if row.epochs is None else f"{row.epochs:.3g}",
        f"{row.global_batch_size:,}",
        f"{row.initial_lr:g}",
        _time(row.time_s),
        speedup + ("*" if row.unequal and row.speedup is not None else ""),
        own,
        *(
            of_mean(row.others[name], Measure(name, is_share=name in row.shares), has_failed)
            if name in row.others
            else "-"
            for name in _others(first)
        ),
        str(row.seeds),
        *(cell(row) for cell in _of_modes(rows).values()),
    ]


def _time(mean: Mean) -> str:
    """Format a time, with the median and all values if its interval includes negative times."""
    if not mean.n:
        return "-"
    scale, unit = (
        (3600, "h") if mean.value >= 3600 else (60, "min") if mean.value >= 60 else (1, "s")
    )
    if isfinite(mean.half) and mean.half > mean.value:
        every = ", ".join(f"{value / scale:.3g}" for value in mean.values)
        return f"median {median(mean.values) / scale:.3g} ({every}) {unit}"
    interval = f" ± {mean.half / scale:.2g}" if isfinite(mean.half) else ""
    return f"{mean.value / scale:.3g}{interval} {unit}"


def ratio(speedup: Ratio) -> str:
    is_known = speedup.low < speedup.high < inf
    interval = f" ({speedup.low:.3g} to {speedup.high:.3g})" if is_known else ""
    return f"{speedup.value:.2f}x{interval}"


def verdict(difference: Difference) -> str:
    """Return a verdict; if undecided, with the number of runs that would decide it."""
    if difference.verdict != UNDECIDED:
        return difference.verdict
    if difference.more is None:
        return f"{UNDECIDED} (nor would {MOST_RUNS} of each)"
    return f"{UNDECIDED} (about {difference.more} more of each would do)"


def verdicts(rows: Sequence[GroupRow]) -> list[str]:
    lines = []
    for letter, row in zip(letters(len(rows)), rows, strict=True):
        if row.failure:
            lines.append(f"{letter}: failed: {row.failure}")
        if row.idle_by_stage and row.idle_if_equal is not None:
            idle = ", ".join(f"{share:.0%}" for share in row.idle_by_stage)
            lines.append(
                f"{letter}: stages idle for {idle}; equal ones for {row.idle_if_equal:.0%}"
            )
        if row.why_no_speedup:
            if row is not rows[0]:
                lines.append(f"{letter}: no speedup over A: {row.why_no_speedup}")
        elif row.unequal:
            lines.append(f"{letter}: * not the same work as A ({', '.join(row.unequal)})")
        if row is not rows[0] and row.speedup is not None:
            lines += _of_speedup(letter, row.speedup)
        if row.against is None:
            continue
        difference = row.against
        said = f"{letter}: {row.measure.words} {of_difference(difference, row.measure)} from A"
        if isfinite(difference.low):
            said += f", p = {difference.p_value:.2g}, g = {difference.effect:+.2g}"
        below = (
            f"; its speedup is to a worse {row.measure.words}"
            if row.is_worse and row.speedup
            else ""
        )
        lines.append(f"{said}: {verdict(difference)}{below}")
    return lines


def _of_speedup(letter: str, speedup: Ratio) -> list[str]:
    if speedup.high == inf:
        return [f"{letter}: its speedup is of too few runs for an interval"]
    if not speedup.is_shown:
        return [
            f"{letter}: neither faster nor slower is shown: the interval of its speedup has 1 in it"
        ]
    return []


def _checks(items: Sequence[Item]) -> list[str]:
    return [f"[{'x' if item.is_met else ' '}] {item.what}: {item.why}" for item in items]


def _sources(rows: Sequence[GroupRow]) -> list[str]:
    return [
        f"{letter}: {', '.join(row.runs)}"
        for letter, row in zip(letters(len(rows)), rows, strict=True)
    ]
