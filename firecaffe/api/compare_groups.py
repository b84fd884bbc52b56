"""`firecaffe compare --by recipe` and `--html`: groups over seeds, as in FireCaffe's table 2."""

import io
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from math import inf, isfinite
from statistics import median
from typing import Any

from jinja2 import Environment, StrictUndefined
from rich.console import RenderableType
from rich.text import Text

from firecaffe.api.answer import PLAIN, disable_math_text, load_figure, numbers_table
from firecaffe.resume_advice import option
from firecaffe.runs.checklist import Item
from firecaffe.runs.curves import Curves, Point, curves_of
from firecaffe.runs.measure import Measure, in_words, of_difference, of_mean
from firecaffe.runs.run_table import OWN_CODE, TableRun, places
from firecaffe.runs.seed_groups import GroupRow, RunGroup, differing, lettered, letters
from firecaffe.runs.statistics import MAX_RUNS, UNDECIDED, Difference, Mean, Ratio
from firecaffe.synchrony.config import EVERY_STEP

MAX_OTHERS = 2
"""Most other metrics in a table, next to the one by which runs are judged."""


def headers(rows: Sequence[GroupRow]) -> list[str]:
    metrics = [rows[0].measure.words, *map(in_words, _others(rows[0]))]
    known = ["hardware", "net", "epochs", "batch", "initial\nlr", "time", "speedup"]
    return [*known, *metrics, "seeds", *_mode_columns(rows)]


def _mode_columns(rows: Sequence[GroupRow]) -> dict[str, Callable[[GroupRow], str]]:
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
    return list(first.others)[:MAX_OTHERS]


def render_groups(
    rows: Sequence[GroupRow],
    items: Sequence[Item],
    words: Mapping[str, Sequence[Any]],
    target: float | None,
) -> list[RenderableType]:
    """Return the table and lines below it. `words` are the differing fields' values by group."""
    time = "time to target" if target is not None else "time"
    names = ["", *(time if header == "time" else header for header in headers(rows))]
    table = numbers_table(*names, texts=("", "hardware", "net"), no_wrap=False, **PLAIN)
    for letter, row in lettered(rows):
        table.add_row(letter, *cells(row, rows))
    differ = [
        f"{word}: {', '.join(f'{letter} {value}' for letter, value in lettered(values))}"
        for word, values in shown_settings(words).items()
    ]
    checks = [f"[{'x' if item.is_met else ' '}] {item.what}: {item.why}" for item in items]
    sources = [f"{letter}: {', '.join(row.runs)}" for letter, row in lettered(rows)]
    above = [*differ, ""] if differ else []
    lines = ["", *above, *verdicts(rows), "", *checks, "", *sources]
    return [table, *map(Text, lines)]


DIGESTS = ("environment.source", OWN_CODE)


def shown_settings(words: Mapping[str, Sequence[Any]]) -> dict[str, list[str]]:
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
        *(cell(row) for cell in _mode_columns(rows).values()),
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
        return f"{UNDECIDED} (nor would {MAX_RUNS} of each)"
    return f"{UNDECIDED} (about {difference.more} more of each would do)"


def verdicts(rows: Sequence[GroupRow]) -> list[str]:
    lines = []
    for letter, row in lettered(rows):
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
            lines += _speedup_remarks(letter, row.speedup)
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


def _speedup_remarks(letter: str, speedup: Ratio) -> list[str]:
    if speedup.high == inf:
        return [f"{letter}: its speedup is of too few runs for an interval"]
    if not speedup.is_shown:
        return [
            f"{letter}: neither faster nor slower is shown: the interval of its speedup has 1 in it"
        ]
    return []


ID_SALT = "firecaffe"
"""Salt of matplotlib's ids, which else are random: the same runs give the same bytes."""

SMOOTHING_SHARE = 0.05
"""Share of a curve's points that are averaged for a smoothed point."""
MAX_MARKED_POINTS = 20
"""Most points of a curve that is drawn unsmoothed, with a mark at each point."""
MAX_NAME_WORDS = 3

Of = Callable[[Point], float | None]
Units = Mapping[str, float]

TIME_UNITS: Units = {"s": 1, "min": 60, "h": 3600}
SAMPLE_UNITS: Units = {"": 1, "thousands": 1e3, "millions": 1e6, "billions": 1e9}
BYTE_UNITS: Units = {"kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}

AXES: dict[str, tuple[str, Units, Of]] = {
    "time": ("time of training", TIME_UNITS, lambda point: point.time_s),
    "samples": ("samples seen", SAMPLE_UNITS, lambda point: point.samples),
    "bytes": ("gradients sent", BYTE_UNITS, lambda point: point.sent_bytes),
}
Line = tuple[str, Callable[[Curves], list[Point]], float]
"""A curve's name, its points, and the factor of their values."""


def lines_of(measure: Measure) -> dict[str, Line]:
    name = f"{measure.words} of evaluations{', %' if measure.is_share else ''}"
    return {
        "loss": ("training loss", lambda curves: curves.loss, 1.0),
        "metric": (name, lambda curves: curves.metric, measure.scale),
    }


@dataclass(frozen=True)
class Picture:
    """An SVG in a data address, and a description of it."""

    words: str
    address: str


def unit_for(largest: float, units: Units) -> tuple[str, float]:
    """Return the largest unit that fits twice into `largest`, or else the smallest."""
    fitting = [(name, size) for name, size in units.items() if largest >= 2 * size]
    return fitting[-1] if fitting else next(iter(units.items()))


def smoothed(values: Sequence[float]) -> list[float]:
    """Average each value with its neighbours on both sides, with fewer at the ends."""
    reach = round(SMOOTHING_SHARE * len(values) / 2) if len(values) > MAX_MARKED_POINTS else 0
    averages = []
    for place in range(len(values)):
        near = min(reach, place, len(values) - 1 - place)
        window = values[place - near : place + near + 1]
        averages.append(sum(window) / len(window))
    return averages


def line_names(called: Sequence[str], words: Mapping[str, Sequence[str]]) -> list[str]:
    """Return names like "A: base_lr 0.1, global_batch_size 64": a letter and what differs."""
    names = []
    for place, letter in enumerate(called):
        said = [f"{word.split('.')[-1]} {values[place]}" for word, values in words.items()]
        rest = ["…"] if len(said) > MAX_NAME_WORDS else []
        names.append(
            ": ".join([letter, *([", ".join([*said[:MAX_NAME_WORDS], *rest])] if said else [])])
        )
    return names


def pictures(names: Sequence[str], groups: Sequence[RunGroup]) -> list[Picture]:
    """Draw the curves. Raises RecipeError without matplotlib; RunError for unreadable metrics."""
    load_figure(option("html"))
    from matplotlib import rc_context

    measure = groups[0].first.measure
    of_groups = [[_curves(run, measure) for run in group.runs] for group in groups]
    drawn = []
    with rc_context({"svg.hashsalt": ID_SALT, "svg.fonttype": "path", "font.size": 12}):
        for line in lines_of(measure).values():
            ylabel, points_of, _ = line
            for axis, (what, units, x_of) in AXES.items():
                known = [
                    x_of(point) or 0
                    for several in of_groups
                    for curves in several
                    for point in points_of(curves)
                ]
                if any(known):
                    unit, size = unit_for(max(known), units)
                    xlabel = f"{what}, {unit}" if unit else what
                    address = _draw(names, of_groups, axis, line, xlabel, size)
                    drawn.append(Picture(f"{ylabel} against {xlabel}", address))
    return drawn


def _curves(run: TableRun, measure: Measure) -> Curves:
    curves = curves_of(run)
    return curves if run.measure == measure else Curves(curves.loss, [])


def _draw(
    names: Sequence[str],
    of_groups: Sequence[Sequence[Curves]],
    axis: str,
    line: Line,
    xlabel: str,
    size: float,
) -> str:
    x_of = AXES[axis][2]
    ylabel, points_of, unit = line
    figure = load_figure(option("html"))(figsize=(5, 3.4))
    place = figure.subplots()
    for number, (name, several) in enumerate(zip(names, of_groups, strict=True)):
        color = f"C{number % 10}"
        for curves in several:
            points = [(x_of(point), point.value) for point in points_of(curves)]
            known = [(x / size, unit * y) for x, y in points if x is not None and y is not None]
            xs, ys = [x for x, _ in known], [y for _, y in known]
            mark = "." if len(known) <= MAX_MARKED_POINTS else ""
            if not mark:
                place.plot(xs, ys, color=color, linewidth=0.6, alpha=0.25)
            place.plot(xs, smoothed(ys), color=color, linewidth=1.2, marker=mark)
        place.plot([], [], color=color, label=name)
    place.set(xlabel=xlabel, ylabel=ylabel)
    place.grid(alpha=0.3)
    place.legend(loc="best", fontsize=9, ncols=-(-len(names) // 5))
    disable_math_text(figure)
    figure.tight_layout()
    picture = io.BytesIO()
    figure.savefig(picture, format="svg", metadata={"Date": None, "Creator": None})
    return f"data:image/svg+xml;base64,{b64encode(picture.getvalue()).decode()}"


def page(
    groups: Sequence[RunGroup],
    rows: Sequence[GroupRow],
    items: Sequence[Item],
    target: float | None,
) -> str:
    """Return the report as HTML that needs no other file. Raises the errors of `pictures`."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    template = resources.files(__package__).joinpath("compare_page.html.jinja").read_text("utf-8")
    names = ["row", *(header.replace("\n", " ") for header in headers(rows))]
    if target is not None:
        names[names.index("time")] = f"time to {rows[0].measure.shown(target)}"
    called = letters(len(rows))
    words = shown_settings(differing(groups))
    return environment.from_string(template).render(
        headers=names,
        rows=[[letter, *cells(row, rows)] for letter, row in lettered(rows)],
        verdicts=verdicts(rows),
        pictures=pictures(line_names(called, words), groups),
        words=words,
        letters=called,
        items=items,
        sources=_runs_of(groups),
    )


def _runs_of(groups: Sequence[RunGroup]) -> list[tuple[str, list[tuple[str, str]]]]:
    where = iter(places([run for group in groups for run in group.runs]))
    return [
        (letter, [(next(where), run.result["weights_sha256"][:12]) for run in group.runs])
        for letter, group in lettered(groups)
    ]
