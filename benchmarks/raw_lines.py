"""Raw measurements: a file of one JSON object a line, each there as soon as it is known."""

import json
from pathlib import Path
from typing import Any


def append(path: Path, row: dict[str, Any]) -> None:
    """Adds a line; the folder is made where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def read(path: Path, kind: str) -> list[dict[str, Any]]:
    """The lines of one kind, in order; none where there is no file."""
    if not path.exists():
        return []
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if row["kind"] == kind]
