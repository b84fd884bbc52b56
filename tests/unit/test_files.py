"""Files are whole or not there; JSON and TOML are read by their schemas."""

import errno
import fcntl
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, TypedDict, cast

import pytest

from firecaffe import files
from firecaffe.errors import RecipeError, RunError, file_error
from firecaffe.files import (
    GrowingFile,
    atomic_replace,
    check_writable,
    create_empty,
    folder_lock,
    private_folder,
    read_lines,
    read_small,
    sync_file,
    sync_folder,
    write_atomically,
    write_json,
)
from firecaffe.schema import Amount, Count, parse_toml, read_file, read_rows


def refuse(*_: object) -> NoReturn:
    raise OSError(28, "No space left on device")


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


def test_only_the_name_that_was_asked_for_is_told(tmp_path: Path) -> None:
    """Not that of the file aside, which the system names before it."""
    (tmp_path / "there").mkdir()
    with pytest.raises(OSError, match="there") as refusal:
        write_atomically(tmp_path / "there", "text\n")
    assert (refusal.value.filename2, "None" in str(refusal.value)) == (None, False)


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    """Whoever may do so would have a file in the place of /dev/full, /dev/stdout or /dev/null."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="no regular file"):
        write_atomically(pipe, "text\n")
    with pytest.raises(FileExistsError):
        create_empty(pipe)
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


def test_who_tries_a_path_leaves_alone_what_another_rank_writes_there(tmp_path: Path) -> None:
    with atomic_replace(tmp_path / "found.toml") as aside:
        aside.write_text("whole")
        check_writable(tmp_path / "found.toml")
    assert [path.name for path in tmp_path.iterdir()] == ["found.toml"]
    assert (tmp_path / "found.toml").read_text() == "whole"
    for path in (tmp_path / ("n" * 250), tmp_path / "none" / "found.toml"):
        with pytest.raises(OSError, match=os.strerror(errno.ENAMETOOLONG) + "|No such"):
            check_writable(path)


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


def test_json_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    value = {"b": [1, 2.5, None], "a": "ü"}
    write_json(tmp_path / "a.json", value)
    text = (tmp_path / "a.json").read_bytes().decode()
    assert json.loads(text) == value
    assert text.endswith("}\n")
    with pytest.raises(TypeError):
        write_json(tmp_path / "a.json", {"x": object()})
    assert (tmp_path / "a.json").read_bytes().decode() == text


def test_sync_asks_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.fstat(number).st_ino))
    path = tmp_path / "a"
    path.touch()
    sync_file(path)
    sync_folder(tmp_path)
    assert synced == [path.stat().st_ino, tmp_path.stat().st_ino]


@pytest.mark.parametrize("is_link", [True, False])
def test_what_lies_aside_is_not_followed(tmp_path: Path, is_link: bool) -> None:
    victim, aside = tmp_path / "victim", tmp_path / ".partial.a.txt"
    victim.write_text("mine\n")
    if is_link:
        aside.symlink_to(victim)
    else:
        aside.write_text("of a process that was killed, and longer\n")
    write_atomically(tmp_path / "a.txt", "new\n")
    assert victim.read_text() == "mine\n"
    assert (tmp_path / "a.txt").read_text() == "new\n"
    assert not (tmp_path / "a.txt").is_symlink()


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_is_no_regular_file_is_not_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(OSError, match=r"no regular file|directory"):
        read_small(path)
    with pytest.raises(OSError, match=r"no regular file|directory"):
        next(read_lines(path))


def test_a_line_has_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"1234\n12345\n")
    lines = read_lines(path, most_bytes=5)
    assert next(lines) == b"1234\n"
    with pytest.raises(ValueError, match="line 2 is longer than 5 bytes"):
        next(lines)


class Row(TypedDict):
    step: Count
    took_s: Amount


@dataclass(frozen=True)
class Words:
    name: str
    rates: tuple[float, ...] = ()


def test_a_dictionary_keeps_what_its_schema_does_not_name_and_a_dataclass_is_made(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.json").write_text('{"step": 3, "took_s": 1, "more": [null]}')
    row = read_file(tmp_path / "a.json", Row, RunError)
    assert dict(row) == {"step": 3, "took_s": 1, "more": [None]}
    (tmp_path / "a.toml").write_text('name = "x"\nrates = [1, 2.5]')
    words = read_file(tmp_path / "a.toml", Words, RecipeError, parse_toml)
    assert words == Words("x", (1.0, 2.5))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a." * 20_000 + "a = 1", "nested too deep"),
        ('[\'a\' . "\\"".' + "a . '=' ." * 50 + "a]", "nested too deep"),
        ("a = " + "[" * 5_000, "nested too deep"),
        ("a = 0x" + "f" * 5_000, "20,000 bits"),
        ("a = [{ b = -1" + "0" * 20 + " }]", "67 bits"),
    ],
)
def test_toml_that_costs_more_than_it_is_long_is_refused(
    tmp_path: Path, text: str, words: str
) -> None:
    (tmp_path / "a.toml").write_text(text)
    with pytest.raises(RecipeError, match=f"a.toml: cannot be read .*{words}"):
        read_file(tmp_path / "a.toml", dict, RecipeError, parse_toml)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is no JSON"),
        ("[" * 100_000, "nested too deep"),
        ("[]", "expected object, got array"),
        ('{"step": "3", "took_s": 1}', r"\$\.step: expected int, got str, found '3'"),
        ('{"step": true, "took_s": 1}', r"\$\.step: expected int, got bool"),
        ('{"step": -1, "took_s": 1}', r"\$\.step: expected int >= 0, found -1"),
        ('{"step": 1, "took_s": NaN}', "is no JSON"),
        ('{"step": 1, "took_s": 1e400}', "out of range"),
        ('{"step": ' + "9" * 40 + ', "took_s": 1}', r"\$\.step"),
        ('{"took_s": 1}', "missing required field step"),
        ('{"step": 1, "took_s": "\\ud800"}', "is no JSON"),
    ],
)
def test_what_is_wrong_is_told(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(RunError, match=f"a.json: cannot be read .*{words}"):
        read_file(path, Row, RunError)
    path.write_text('{"step": 1, "took_s": 1}\n' + text + "\n")
    if text:
        with pytest.raises(RunError, match=f"line 2: .*{words}"):
            list(read_rows(path, Row))


def test_rows_that_are_there(tmp_path: Path) -> None:
    path, kind = tmp_path / "a.jsonl", dict[str, Any]
    assert list(read_rows(path, kind)) == []
    path.write_text('{"kind": "a"}\n{"kind": "b"}\n{"kind": "b", "cut')
    assert list(read_rows(path, kind)) == [{"kind": "a"}, {"kind": "b"}]
    assert list(read_rows(path, kind, holding=b'"b"')) == [{"kind": "b"}]


def test_a_private_folder_is_locked_and_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What clears old files asks for the lock first."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with private_folder("mine-") as folder:
        assert list(tmp_path.glob("mine-*")) == [folder]
        descriptor = os.open(folder, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(descriptor)
    assert not list(tmp_path.iterdir())


def test_private_folders_of_killed_processes_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those of running ones and other hosts; one that is taken meanwhile is made anew."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with private_folder("mine-") as one:
        start = one.name[: len("mine-") + 7]
    assert start.startswith("mine-")
    assert start.endswith("-")
    (left := tmp_path / f"{start}left").mkdir()
    (left / "handed").write_text("old")
    of_another_host = tmp_path / "mine-abcdef-left"
    of_another_host.mkdir()
    (tmp_path / "others").mkdir()
    link = tmp_path / f"{start}link"
    link.symlink_to(tmp_path / "others")
    taken: list[Path] = []

    def lose_two(folder: Path) -> Any:
        if len(taken) == 2:
            return folder_lock(folder)
        taken.append(folder)
        folder.rmdir()
        return folder_lock(folder if len(taken) == 1 else tmp_path)  # before and after it is opened

    with private_folder("mine-") as running:
        monkeypatch.setattr(files, "folder_lock", lose_two)
        with private_folder("mine-") as folder:
            assert len({*taken, folder}) == 3
            assert {*tmp_path.glob("mine-*")} == {running, folder, link, of_another_host}
    assert {*tmp_path.iterdir()} == {link, of_another_host, tmp_path / "others"}


def test_a_growing_file_that_takes_no_more_is_named(tmp_path: Path) -> None:
    """As of a disk that the system has made read-only after an error."""

    def refused(_: bytes) -> NoReturn:
        raise OSError(errno.EROFS, "Read-only file system")

    file, path = GrowingFile(tmp_path / "rows.jsonl"), tmp_path / "rows.jsonl"
    file.close()
    file._file = cast(Any, SimpleNamespace(write=refused, name=path))
    with pytest.raises(OSError, match=r"rows\.jsonl") as refusal:
        file.write(b"row")
    assert file_error(refusal.value) is not None
