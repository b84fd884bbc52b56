"""`firecaffe compare --by recipe`: groups over seeds, in the form of FireCaffe's table 2."""

import dataclasses
import json
from collections.abc import Sequence
from math import isfinite

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from firecaffe.runs.checklist import Item
from firecaffe.runs.files import finite
from firecaffe.runs.groups import GroupRow, letters
from firecaffe.runs.statistics import Mean

HEADERS = (
    "hardware",
    "net",
    "epochs",
    "batch",
    "initial\nlr",
    "time",
    "speedup",
    "top-1",
    "top-5",
    "seeds",
)


def as_json(rows: Sequence[GroupRow], items: Sequence[Item]) -> str:
    """JSON has no infinities: what one run does not bear is null."""
    words = {
        "groups": [finite(dataclasses.asdict(row)) for row in rows],
        "checklist": [dataclasses.asdict(item) for item in items],
    }
    return json.dumps(words, indent=2)


def render_groups(
    rows: Sequence[GroupRow], items: Sequence[Item], target: float | None
) -> list[RenderableType]:
    """The table, what is to be said of each difference, the checklist, whose figures they are."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    title = "time to target" if target is not None else "time"
    for header in ("", *HEADERS):
        name = title if header == "time" else header
        table.add_column(name, justify="left" if header in ("", "hardware", "net") else "right")
    for letter, row in zip(letters(len(rows)), rows, strict=True):
        table.add_row(letter, *cells(row))
    lines = [*verdicts(rows), "", *_checks(items), "", *_sources(rows)]
    return [table, Text(), *(Text(line) for line in lines)]


def cells(row: GroupRow) -> list[str]:
    """A row of the table, as HEADERS name it."""
    speedup = "-" if row.speedup is None else f"{row.speedup:.2f}x"
    return [
        row.hardware,
        row.net,
        "?" if row.epochs is None else f"{row.epochs:.3g}",
        f"{row.global_batch_size:,}",
        f"{row.initial_lr:g}",
        _time(row.time_s),
        speedup + ("*" if row.unequal and row.speedup is not None else ""),
        _percent(row.top1),
        "-" if row.top5 is None else _percent(row.top5),
        str(row.seeds),
    ]


def _percent(mean: Mean) -> str:
    interval = f" ± {100 * mean.half:.2f}" if isfinite(mean.half) else ""
    return f"{100 * mean.value:.2f}{interval} %"


def _time(mean: Mean) -> str:
    if not mean.n:
        return "-"
    scale, unit = (
        (3600, "h") if mean.value >= 3600 else (60, "min") if mean.value >= 60 else (1, "s")
    )
    interval = f" ± {mean.half / scale:.2g}" if isfinite(mean.half) else ""
    return f"{mean.value / scale:.3g}{interval} {unit}"


def verdicts(rows: Sequence[GroupRow]) -> list[str]:
    """What is to be said of each group against the first."""
    lines = []
    for letter, row in zip(letters(len(rows)), rows, strict=True):
        if row.why_no_speedup:
            lines.append(f"{letter}: no speedup over A: {row.why_no_speedup}")
        elif row.unequal:
            lines.append(f"{letter}: * not the same work as A ({', '.join(row.unequal)})")
        if row.against is None:
            continue
        found = row.against
        said = f"{letter}: top-1 {100 * found.value:+.2f} points from A"
        if isfinite(found.low):
            said += (
                f" ({100 * found.low:+.2f} to {100 * found.high:+.2f}), p = {found.p_value:.2g}, "
                f"g = {found.effect:+.2g}"
            )
        below = "; its speedup is to a lower accuracy" if row.is_worse and row.speedup else ""
        lines.append(f"{said}: {found.verdict}{below}")
    return lines


def _checks(items: Sequence[Item]) -> list[str]:
    return [f"[{'x' if item.is_met else ' '}] {item.what}: {item.why}" for item in items]


def _sources(rows: Sequence[GroupRow]) -> list[str]:
    return [
        f"{letter}: {', '.join(row.runs)}"
        for letter, row in zip(letters(len(rows)), rows, strict=True)
    ]
