"""The log of a resumed run: the events up to the checkpoint, then those that come."""

import os
from pathlib import Path
from random import Random
from typing import NoReturn

import pytest

from firecaffe.synchrony.events import Event
from firecaffe.synchrony.log import Lines, head
from firecaffe.training.served.server_steps import keep_lines
from tests.unit.synchrony.drive import drive
from tests.unit.synchrony.test_policies import POLICIES


def some_events() -> list[Event]:
    return drive(POLICIES["asynchronous"], Random(5).randrange)


def write(path: Path) -> bytes:
    lines = Lines()
    path.write_bytes(b"".join([lines.line(head(2, 3)), *map(lines.event, some_events())]))
    return path.read_bytes()


def test_a_log_is_gone_on_with_after_some_lines(tmp_path: Path) -> None:
    path, other = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    write(path)
    lines = Lines()
    for row in [lines.line(head(2, 3)), *map(lines.event, some_events()[:7])]:
        assert row
    assert keep_lines(path, other, lines.count)
    with open(other, "ab") as file:
        file.writelines(map(lines.event, some_events()[7:]))
    assert other.read_bytes() == path.read_bytes()


def test_a_log_that_lacks_lines_is_not_gone_on_with(tmp_path: Path) -> None:
    path, other = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    whole = write(path)
    count = len(some_events()) + 1
    assert not keep_lines(tmp_path / "none", other, 1)
    assert not keep_lines(path, other, count + 1)
    for damaged in (whole[:-1], b"\xff" + whole[1:]):
        path.write_bytes(damaged)
        assert not keep_lines(path, other, count)
    assert not other.exists()


def test_a_log_that_cannot_be_cut_stays_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is resumed cuts its own log; a disk may be full."""

    def refuse(*_: object) -> NoReturn:
        raise OSError(28, "No space left on device")

    path = tmp_path / "events.jsonl"
    whole = write(path)
    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="No space"):
        keep_lines(path, path, 3)
    assert path.read_bytes() == whole
