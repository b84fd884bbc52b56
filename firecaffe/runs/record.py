"""The records that a run writes while it goes on."""

import json
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from torch.utils.tensorboard import SummaryWriter

from firecaffe.runs.files import finite


class JsonLines:
    """A file of one JSON object a line, each in the file as soon as it is written."""

    def __init__(self, path: Path) -> None:
        self._file: TextIO = path.open("x", encoding="utf-8", buffering=1)

    def write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(finite(row), allow_nan=False) + "\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()


class Metrics:
    """metrics.jsonl, and the same numbers as TensorBoard curves."""

    def __init__(self, folder: Path, tensorboard: bool) -> None:
        self._lines = JsonLines(folder / "metrics.jsonl")
        self._curves = SummaryWriter(str(folder / "tensorboard")) if tensorboard else None

    def write(self, kind: str, step: int, values: dict[str, float]) -> None:
        """One row of a kind ("train" or "test") at a step, counted from 1."""
        self._lines.write({"kind": kind, "step": step, **values})
        if self._curves is not None:
            for name, value in values.items():
                self._curves.add_scalar(f"{kind}/{name}", value, step)

    def flush(self) -> None:
        if self._curves is not None:
            self._curves.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lines.__exit__(kind, error, trace)
        if self._curves is not None:
            self._curves.close()


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines; a last line cut short by a fault is left out."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]
