"""Files are whole or not there."""

import json
import os
from pathlib import Path
from typing import NoReturn

import pytest

from firecaffe.files import sync_file, sync_folder, write_atomically, write_json


def refuse(*_: object) -> NoReturn:
    raise OSError(28, "No space left on device")


def test_written_whole_and_nothing_else(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a.txt", "übrig\n")
    assert (tmp_path / "a.txt").read_bytes() == "übrig\n".encode()
    write_atomically(tmp_path / "a.txt", "second\n")
    assert (tmp_path / "a.txt").read_text() == "second\n"
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failure_keeps_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "a.txt"
    write_atomically(path, "old\n")
    with monkeypatch.context() as broken:
        broken.setattr(os, call, refuse)
        with pytest.raises(OSError, match="No space"):
            write_atomically(path, "new\n")
    assert path.read_text() == "old\n"
    assert list(tmp_path.iterdir()) == [path]
    write_atomically(path, "new\n")
    assert path.read_text() == "new\n"


def test_the_final_name_appears_only_after_the_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, bool]] = []
    path = tmp_path / "a.txt"
    fsync, replace = os.fsync, os.replace

    def note_fsync(descriptor: int) -> None:
        calls.append(("fsync", path.exists()))
        fsync(descriptor)

    def note_replace(source: Path, target: Path) -> None:
        assert source.read_text() == "whole\n"
        calls.append(("replace", path.exists()))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    write_atomically(path, "whole\n")
    # The content, then the name, then the folder that holds the name.
    assert calls == [("fsync", False), ("replace", False), ("fsync", True)]


def test_json(tmp_path: Path) -> None:
    value = {"b": [1, 2.5, None], "a": "ü"}
    write_json(tmp_path / "a.json", value)
    text = (tmp_path / "a.json").read_text()
    assert json.loads(text) == value
    assert text.endswith("}\n")


def test_no_half_json_where_a_value_cannot_be_written(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"x": 1})
    before = (tmp_path / "a.json").read_text()
    with pytest.raises(TypeError):
        write_json(tmp_path / "a.json", {"x": object()})
    assert (tmp_path / "a.json").read_text() == before


def test_sync_asks_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.fstat(number).st_ino))
    path = tmp_path / "a"
    path.touch()
    sync_file(path)
    sync_folder(tmp_path)
    assert synced == [path.stat().st_ino, tmp_path.stat().st_ino]
