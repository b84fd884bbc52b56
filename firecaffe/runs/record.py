"""The records that a run writes while it goes on."""

import errno
import json
from contextlib import suppress
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from firecaffe.runs.files import finite


class JsonLines:
    """A file of one JSON object a line, each in the file as soon as it is written.

    Where the disk is full the run goes on, and its rows wait until there is room.
    """

    def __init__(self, path: Path, goes_on: bool = False) -> None:
        """goes_on: whether rows follow those of an earlier attempt at this run."""
        self._file = FileIO(path, "a" if goes_on else "x")
        self._waiting = b""

    def write(self, row: dict[str, Any]) -> None:
        self._waiting += json.dumps(finite(row), allow_nan=False).encode() + b"\n"
        try:
            while self._waiting:
                written = self._file.write(self._waiting)
                self._waiting = self._waiting[written:]
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise

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

    def __init__(self, folder: Path, tensorboard: bool, after_step: int | None = None) -> None:
        """after_step: where an earlier attempt at this run is gone on from."""
        self._lines = JsonLines(folder / "metrics.jsonl", goes_on=after_step is not None)
        self._curves = None
        if tensorboard:
            # Here, for it takes a tenth of a second from every command that writes no curves.
            from torch.utils.tensorboard import SummaryWriter

            purge = None if after_step is None else after_step + 1
            self._curves = SummaryWriter(str(folder / "tensorboard"), purge_step=purge)

    def write(self, kind: str, step: int, values: dict[str, float]) -> None:
        """One row of a kind (train, validation or test) at a step, counted from 1."""
        self._lines.write({"kind": kind, "step": step, **values})
        if self._curves is not None:
            with suppress(OSError):  # a full disk: the lines have the same numbers
                for name, value in values.items():
                    self._curves.add_scalar(f"{kind}/{name}", value, step)

    def flush(self) -> None:
        if self._curves is not None:
            with suppress(OSError):
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
            with suppress(OSError):
                self._curves.close()


def read_json_lines(path: Path, holding: str = "") -> list[dict[str, Any]]:
    """The rows of a file of JSON lines; a last line cut short by a fault is left out.

    holding: of those alone that have this text in them, which is faster for a few among many.
    """
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n") and holding in line]
