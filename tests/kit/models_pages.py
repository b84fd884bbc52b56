"""Pages of the project as tests read them: their text, and their tables by name."""

from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@cache
def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def table(
    name: str, heading: str, after: str = "\n", until: str = "\0"
) -> dict[str, dict[str, str]]:
    """The tables of a page: see `table_of`. after, until: text between which they stand."""
    return table_of(page(name).partition(after)[2].partition(until)[0], heading)


def table_of(text: str, heading: str) -> dict[str, dict[str, str]]:
    """The tables whose first column is headed so: by the first cell, the others by heading.

    Code marks of a row's name are left out.
    """
    rows: dict[str, dict[str, str]] = {}
    headings: list[str] = []
    for line in text.splitlines():
        if not line.startswith("|"):
            headings = []
        elif cells(line)[0] == heading:
            headings = cells(line)
        elif headings and not set(line) <= set("|-: "):
            row = dict(zip(headings, cells(line), strict=True))
            label = row[heading].strip("`")
            assert label not in rows, f"{label} stands there twice"
            rows[label] = row
    return rows
