"""`firecaffe compare --html`: one file with the table, the curves and the checklist.

A curve is named by what differs between the groups. It is smoothed. The values of each step are
drawn faintly behind it, because a loss scatters more from step to step than it falls.
"""

import io
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

from jinja2 import Environment, StrictUndefined

from firecaffe.api.answer import load_figure, take_literally
from firecaffe.api.compare_groups import cells, headers, shown_words, verdicts
from firecaffe.resume_advice import option
from firecaffe.runs.checklist import Item
from firecaffe.runs.curves import Curves, Point, curves_of
from firecaffe.runs.measure import Measure
from firecaffe.runs.run_table import TableRun, places
from firecaffe.runs.seed_groups import GroupRow, RunGroup, differing, letters

ID_SALT = "firecaffe"
"""Salt of matplotlib's ids, which else are random: the same runs give the same bytes."""

SMOOTHING_SHARE = 0.05
"""Share of a curve's points that are averaged for a smoothed point."""
MOST_MARKED_POINTS = 20
"""Most points of a curve that is drawn unsmoothed, with a mark at each point."""
MOST_NAME_WORDS = 3

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
    reach = round(SMOOTHING_SHARE * len(values) / 2) if len(values) > MOST_MARKED_POINTS else 0
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
        rest = ["…"] if len(said) > MOST_NAME_WORDS else []
        names.append(
            ": ".join([letter, *([", ".join([*said[:MOST_NAME_WORDS], *rest])] if said else [])])
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
            mark = "." if len(known) <= MOST_MARKED_POINTS else ""
            if not mark:
                place.plot(xs, ys, color=color, linewidth=0.6, alpha=0.25)
            place.plot(xs, smoothed(ys), color=color, linewidth=1.2, marker=mark)
        place.plot([], [], color=color, label=name)
    place.set(xlabel=xlabel, ylabel=ylabel)
    place.grid(alpha=0.3)
    place.legend(loc="best", fontsize=9, ncols=-(-len(names) // 5))
    take_literally(figure)
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
    words = shown_words(differing(groups))
    return environment.from_string(template).render(
        headers=names,
        rows=[[letter, *cells(row, rows)] for letter, row in zip(called, rows, strict=True)],
        verdicts=verdicts(rows),
        pictures=pictures(line_names(called, words), groups),
        words=words,
        letters=called,
        items=items,
        sources=_sources(called, groups),
    )


def _sources(
    called: Sequence[str], groups: Sequence[RunGroup]
) -> list[tuple[str, list[tuple[str, str]]]]:
    where = iter(places([run for group in groups for run in group.runs]))
    return [
        (letter, [(next(where), run.result["weights_sha256"][:12]) for run in group.runs])
        for letter, group in zip(called, groups, strict=True)
    ]
