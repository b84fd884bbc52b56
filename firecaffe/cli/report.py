"""`firecaffe compare --html`: one file that holds the table, the curves and the checklist."""

import io
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources

from jinja2 import Environment, StrictUndefined

from firecaffe.cli.compare_groups import HEADERS, cells, shown_words, verdicts
from firecaffe.errors import RecipeError
from firecaffe.runs.checklist import Item
from firecaffe.runs.compare import places
from firecaffe.runs.curves import Curves, Point, curves_of
from firecaffe.runs.groups import Group, GroupRow, differing, letters

SALT = "firecaffe"
"""Of matplotlib's ids, which are random otherwise: the same runs give the same bytes."""

Of = Callable[[Point], float | None]

AXES: dict[str, tuple[str, Of]] = {
    "time": ("seconds of training", lambda point: point.time_s),
    "samples": ("samples seen, millions", lambda point: point.samples / 1e6),
    "bytes": (
        "GB of gradients sent",
        lambda point: None if point.sent_bytes is None else point.sent_bytes / 1e9,
    ),
}
CURVES: dict[str, tuple[str, Callable[[Curves], list[Point]], float]] = {
    "loss": ("training loss", lambda curves: curves.loss, 1.0),
    "accuracy": ("top-1 of evaluations, %", lambda curves: curves.top1, 100.0),
}


@dataclass(frozen=True)
class Picture:
    """An SVG in a data address, and in words what it shows."""

    words: str
    address: str


def page(
    groups: Sequence[Group], rows: Sequence[GroupRow], items: Sequence[Item], target: float | None
) -> str:
    """The whole report, which needs no other file.

    Raises: RecipeError where matplotlib is missing; RunError where metrics cannot be read.
    """
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    template = resources.files(__package__).joinpath("report.html.jinja").read_text("utf-8")
    headers = ["", *(header.replace("\n", " ") for header in HEADERS)]
    if target is not None:
        headers[headers.index("time")] = f"time to {target:.2%}"
    called = letters(len(rows))
    return environment.from_string(template).render(
        headers=headers,
        rows=[[letter, *cells(row)] for letter, row in zip(called, rows, strict=True)],
        verdicts=verdicts(rows),
        pictures=_pictures(called, groups),
        words=shown_words(differing(groups)),
        letters=called,
        items=items,
        sources=_sources(called, groups),
    )


def _sources(
    called: Sequence[str], groups: Sequence[Group]
) -> list[tuple[str, list[tuple[str, str]]]]:
    """Of each row its runs' folders, and the digests of their weights: a run's id."""
    where = iter(places([run for group in groups for run in group.runs]))
    return [
        (letter, [(next(where), run.result["weights_sha256"][:12]) for run in group.runs])
        for letter, group in zip(called, groups, strict=True)
    ]


def _pictures(called: Sequence[str], groups: Sequence[Group]) -> list[Picture]:
    try:
        import matplotlib as mpl
    except ImportError:
        raise RecipeError("--html needs matplotlib: pip install 'firecaffe[plot]'") from None
    mpl.use("agg")
    of_groups = [[curves_of(run) for run in group.runs] for group in groups]
    with mpl.rc_context({"svg.hashsalt": SALT, "svg.fonttype": "path", "font.size": 12}):
        return [
            Picture(f"{ylabel} against {xlabel}", _draw(called, of_groups, axis, curve))
            for curve, (ylabel, points_of, _) in CURVES.items()
            for axis, (xlabel, x_of) in AXES.items()
            if any(
                x_of(point)
                for several in of_groups
                for each in several
                for point in points_of(each)
            )
        ]


def _draw(
    called: Sequence[str], of_groups: Sequence[Sequence[Curves]], axis: str, curve: str
) -> str:
    """A line for each run, a color for each group."""
    from matplotlib import pyplot

    xlabel, x_of = AXES[axis]
    ylabel, points_of, unit = CURVES[curve]
    figure, place = pyplot.subplots(figsize=(5, 3.4))
    for number, (letter, several) in enumerate(zip(called, of_groups, strict=True)):
        for each in several:
            points = [(x_of(point), point.value) for point in points_of(each)]
            known = [(x, unit * y) for x, y in points if x is not None and y is not None]
            place.plot(
                [x for x, _ in known],
                [y for _, y in known],
                color=f"C{number % 10}",
                linewidth=1.2,
                marker="." if len(known) <= 20 else "",
            )
        place.plot([], [], color=f"C{number % 10}", label=letter)
    place.set(xlabel=xlabel, ylabel=ylabel)
    place.grid(alpha=0.3)
    place.legend(loc="best", ncols=-(-len(called) // 5))
    figure.tight_layout()
    picture = io.BytesIO()
    figure.savefig(picture, format="svg", metadata={"Date": None, "Creator": None})
    pyplot.close(figure)
    return f"data:image/svg+xml;base64,{b64encode(picture.getvalue()).decode()}"
