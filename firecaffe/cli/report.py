"""`firecaffe compare --html`: one file that holds the table, the curves and the checklist."""

from collections.abc import Sequence
from importlib import resources

from jinja2 import Environment, StrictUndefined

from firecaffe.cli.compare_groups import cells, headers, shown_words, verdicts
from firecaffe.cli.report_curves import line_names, pictures
from firecaffe.runs.checklist import Item
from firecaffe.runs.compare import places
from firecaffe.runs.groups import Group, GroupRow, differing, letters


def page(
    groups: Sequence[Group], rows: Sequence[GroupRow], items: Sequence[Item], target: float | None
) -> str:
    """The whole report, which needs no other file.

    Raises: RecipeError if matplotlib is missing; RunError if metrics cannot be read.
    """
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    template = resources.files(__package__).joinpath("report.html.jinja").read_text("utf-8")
    names = ["", *(header.replace("\n", " ") for header in headers(rows))]
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
    called: Sequence[str], groups: Sequence[Group]
) -> list[tuple[str, list[tuple[str, str]]]]:
    """Each row's runs: their folders, and the digests of their weights, which are a run's id."""
    where = iter(places([run for group in groups for run in group.runs]))
    return [
        (letter, [(next(where), run.result["weights_sha256"][:12]) for run in group.runs])
        for letter, group in zip(called, groups, strict=True)
    ]
