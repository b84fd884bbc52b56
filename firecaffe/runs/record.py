"""The records that a run writes as it proceeds."""

import json
from pathlib import Path
from typing import Any, Self

from firecaffe.files import GrowingFile, finite
from firecaffe.runs.loggers import Loggers


class JsonLines:
    """A file of JSON lines, each written at once. On a full disk, rows wait until there is room."""

    def __init__(self, path: Path, goes_on: bool = False) -> None:
        self._file = GrowingFile(path, goes_on)

    def write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(finite(row), allow_nan=False).encode() + b"\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()


class Metrics:
    """The file metrics.jsonl, and the same numbers as TensorBoard curves and at loggers."""

    def __init__(
        self,
        folder: Path,
        tensorboard: bool,
        after_step: int | None = None,
        loggers: Loggers | None = None,
    ) -> None:
        """`after_step`: the step from which this run continues. `loggers` have begun."""
        self._loggers = loggers
        self._lines = JsonLines(folder / "metrics.jsonl", goes_on=after_step is not None)
        self._curves = None
        if tensorboard:
            # Imported here because it would delay every command that writes no curves.
            from firecaffe.runs.tensorboard import EventFile

            self._curves = EventFile(folder / "tensorboard", after_step)

    def write(self, kind: str, step: int, values: dict[str, float]) -> None:
        self._lines.write({"kind": kind, "step": step, **values})
        named = {f"{kind}/{name}": value for name, value in values.items()}
        if self._curves is not None:
            self._curves.write(step, named)
        if self._loggers is not None:
            self._loggers.log(
                step, {name: value for name, value in named.items() if value is not None}
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.close()
        if self._curves is not None:
            self._curves.close()
