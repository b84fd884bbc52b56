"""Raw measurements: a file of one JSON object a line, each there as soon as it is known."""

import json
from pathlib import Path
from typing import Any

import torch

from firecaffe.runs.environment import commit, cpu_name


def begin(path: Path) -> None:
    """Makes the file, with the line of what measures; one that is there stays as it is."""
    if not path.exists():
        conditions = {"cpu": cpu_name(), "commit": commit()[:12], "torch": torch.__version__}
        append(path, {"kind": "conditions", **conditions})


def append(path: Path, row: dict[str, Any]) -> None:
    """Adds a line; the folder is made where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def read(path: Path, kind: str, **values: Any) -> list[dict[str, Any]]:
    """The lines of one kind that have these values, in order; none where there is no file."""
    if not path.exists():
        return []
    wanted = {"kind": kind, **values}
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if wanted.items() <= row.items()]


def best_rate(path: Path, row: str) -> float:
    """The rate of a row's search with the lowest loss; of those with one loss the lowest."""
    searches = read(path, "search", row=row)
    return float(min(searches, key=lambda each: (each["loss"], each["rate"]))["rate"])
