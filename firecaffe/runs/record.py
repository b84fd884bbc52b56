"""The records that a run writes as it proceeds: rows, TensorBoard's curves, and other services.

The services' libraries are an extra (`pip install firecaffe[loggers]`). Their own variables say
where to send: WANDB_MODE, WANDB_PROJECT, WANDB_API_KEY; MLFLOW_TRACKING_URI,
MLFLOW_EXPERIMENT_NAME.
"""

import hashlib
import io
import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, Self

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

from firecaffe.errors import RecipeError
from firecaffe.files import GrowingFile, finite

VERSION = "brain.Event:2"


class EventFile:
    def __init__(self, folder: Path, after_step: int | None = None) -> None:
        """`after_step`: curves of an earlier attempt are removed after this step."""
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}"
        self._file = GrowingFile(folder / name)
        self._write(Event(file_version=VERSION))
        if after_step is not None:
            start = SessionLog(status=SessionLog.START)
            self._write(Event(step=after_step + 1, session_log=start))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        rows = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(Event(step=step, summary=Summary(value=rows)))

    def close(self) -> None:
        self._file.close()

    def _write(self, event: Event) -> None:
        event.wall_time = time.time()
        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        self._file.write(record.getvalue())


class Logger(Protocol):
    """One run at a service. An error in its methods never ends a training."""

    def begin(self, folder: Path, title: str, words: Mapping[str, Any]) -> None:
        """Begin the run of a folder. `words`: the recipe's, by dotted name."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Send numbers by curve name at a step, counted from 1."""

    def end(self, result: Mapping[str, Any] | None) -> None:
        """End the run. `result` has the numbers of result.json; None if it did not finish."""


class WeightsAndBiases:
    """A run at Weights & Biases. An attempt that continues in a folder continues its run."""

    def begin(self, folder: Path, title: str, words: Mapping[str, Any]) -> None:
        wandb: Any = import_module("wandb")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "firecaffe"),
            name=title,
            dir=str(folder),
            config=dict(words),
            id=hashlib.sha256(str(folder).encode()).hexdigest()[:12],
            resume="allow",
            settings=wandb.Settings(console="off"),  # else it captures the output
        )

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def end(self, result: Mapping[str, Any] | None) -> None:
        self._run.summary.update(dict(result or {}))
        self._run.finish(exit_code=0 if result is not None else 1)


class MLflow:
    def begin(self, folder: Path, title: str, words: Mapping[str, Any]) -> None:
        self._mlflow: Any = import_module("mlflow")
        self._mlflow.start_run(run_name=title, tags={"folder": str(folder)})
        self._mlflow.log_params(dict(words))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(numbers), step=step)

    def end(self, result: Mapping[str, Any] | None) -> None:
        self._mlflow.log_metrics(
            {f"result/{name}": value for name, value in (result or {}).items()}
        )
        self._mlflow.end_run("FINISHED" if result is not None else "FAILED")


LOGGERS: dict[str, Callable[[], Logger]] = {"wandb": WeightsAndBiases, "mlflow": MLflow}
"""Loggers by the name of their library, as `run.loggers` says it."""


def check_loggers(names: Sequence[str]) -> None:
    for name in names:
        if name not in LOGGERS:
            raise RecipeError(
                f"run.loggers has {name!r}; it may have {', '.join(LOGGERS)} (TensorBoard is "
                "run.tensorboard)"
            )


def check_libraries(names: Sequence[str]) -> None:
    for name in names:
        if find_spec(name) is None:
            raise RecipeError(
                f"run.loggers has {name!r}, which is not installed here: pip install "
                "firecaffe[loggers]"
            )


class Loggers:
    """A run's loggers. One that fails is reported once and removed; the training continues."""

    def __init__(self, names: Sequence[str], warn: Callable[[str], None]) -> None:
        check_loggers(names)
        check_libraries(names)
        self._warn = warn
        self._loggers = {name: LOGGERS[name]() for name in names}

    def begin(self, folder: Path, title: str, words: Mapping[str, Any]) -> None:
        self._each(lambda logger: logger.begin(folder, title, words))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._each(lambda logger: logger.log(step, numbers))

    def end(self, result: Mapping[str, Any] | None) -> None:
        numbers = None
        if result is not None:
            numbers = {
                name: float(value)
                for name, value in result.items()
                if isinstance(value, int | float)
            }
        self._each(lambda logger: logger.end(numbers))
        self._loggers = {}

    def _each(self, do: Callable[[Logger], None]) -> None:
        for name, logger in list(self._loggers.items()):
            try:
                do(logger)
            except Exception as error:
                del self._loggers[name]
                reason = " ".join(f"{type(error).__name__}: {error}".split())
                self._warn(f"warning: run.loggers {name} failed and is left out: {reason}")


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
