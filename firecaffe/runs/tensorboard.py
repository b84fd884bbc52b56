"""TensorBoard's curves without the thread of its library, which loses data on a full disk."""

import io
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

from firecaffe.files import GrowingFile

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
