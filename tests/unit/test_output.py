"""A stdout that takes no more costs what it would have shown; a command that only shows ends."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import pytest
from rich.console import Console

from firecaffe import output
from firecaffe.cli import main
from firecaffe.errors import OutputLostError
from firecaffe.output import LOST, kept_stdout, outputs_kept

EPIPE, ENOSPC = "Broken pipe", "No space left on device"


@contextmanager
def stdout_lost(reason: str) -> Iterator[None]:
    """Lets stdout be a pipe that nobody reads, or a full disk."""
    if reason == ENOSPC:
        stream: TextIO = open("/dev/full", "w")  # noqa: SIM115
    else:
        reader, writer = os.pipe()
        os.close(reader)
        stream = os.fdopen(writer, "w")
    before, sys.stdout = sys.stdout, stream
    LOST.clear()
    try:
        yield
        stream.close()  # what the interpreter does at its end
    finally:
        sys.stdout = before
        LOST.clear()


@pytest.mark.parametrize("reason", [EPIPE, ENOSPC])
def test_who_goes_on_is_told_once(reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with stdout_lost(reason), outputs_kept(goes_on=True):
        for _ in range(3):
            sys.stdout.writelines(["a line\n"] * 10_000)
            print("a line", flush=True)
            Console(file=kept_stdout()).print("another")  # which would end the process by itself
        assert reason == LOST["stdout"]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("firecaffe: stdout")
    assert reason in line


@pytest.mark.parametrize("reason", [EPIPE, ENOSPC])
def test_lines_of_ours_in_anyones_process(reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with stdout_lost(reason):
        for _ in range(2):
            print("ours", file=kept_stdout(), flush=True)
    assert capsys.readouterr().err.count(reason) == 1


def test_ranks_say_it_for_their_launcher(capsys: pytest.CaptureFixture[str]) -> None:
    with stdout_lost(EPIPE), outputs_kept(goes_on=True):
        output.share_with_ranks()
        print("a line", flush=True)
        assert {"stdout": EPIPE} == LOST
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("reason", [EPIPE, ENOSPC])
def test_who_only_prints_ends(reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with stdout_lost(reason):
        with pytest.raises(OutputLostError) as caught, outputs_kept(goes_on=False):
            print("a line", flush=True)
        assert caught.value.has_left is (reason == EPIPE)
    with stdout_lost(reason):
        assert main(["schedule", "tree", "4"]) == 8
    said = capsys.readouterr().err
    assert said == ("" if reason == EPIPE else f"firecaffe: stdout: {reason}\n")


def test_a_closed_stdout_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    with outputs_kept(goes_on=True):
        print("a line", flush=True)
        assert LOST["stdout"] == "closed"
    assert sys.stdout is None
    LOST.clear()
    print("a line", file=kept_stdout(), flush=True)


@pytest.mark.parametrize(
    "order", ["\x1b]0;title\x07", "\x1b]52;c;eA==\x1b\\", "\x1b[6n", "\x9b2J", "\x1b]8;;"]
)
def test_a_terminal_gets_no_orders(order: str, capsys: pytest.CaptureFixture[str]) -> None:
    with outputs_kept(goes_on=True):
        print(order, "name")
        print(order, file=sys.stderr)
    said = capsys.readouterr()
    assert "name" in said.out
    assert not {"\x1b", "\x9b"} & {*said.out, *said.err}


def test_what_programs_draw_with_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    link = "\x1b]8;id=1;file:///a.py#7\x1b\\a.py\x1b]8;;\x1b\\"  # as of rich.logging.RichHandler
    drawn = f"{link}\x1b[1;31mred\x1b[0m\r\x1b[2K\x1b[1A\x1b[?25l\t\b\n"
    with outputs_kept(goes_on=True):
        print(drawn, end="")
    assert capsys.readouterr().out == drawn
