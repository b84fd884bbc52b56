"""What another system than Linux is told, and what does without Linux's calls."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from firecaffe.data.shard_files import _Opened
from firecaffe.platforms import why_not

WINDOWS = "import sys; sys.platform = 'win32'; "


def on_windows(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WINDOWS + code]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_only_windows_is_refused() -> None:
    assert "WSL" in why_not("win32")
    assert why_not("linux") == why_not("darwin") == ""


def test_a_command_on_windows_ends_in_one_line() -> None:
    done = on_windows("import runpy; runpy.run_module('firecaffe', run_name='__main__')")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"firecaffe: {why_not('win32')}\n"


def test_a_script_on_windows_is_told_the_same() -> None:
    done = on_windows("from firecaffe import train")
    assert done.stderr.splitlines()[-1] == f"ImportError: {why_not('win32')}"


def test_packed_data_are_read_where_the_system_takes_no_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As macOS."""
    monkeypatch.delattr(os, "posix_fadvise")
    (tmp_path / "shard").write_bytes(b"content")
    opened = _Opened(str(tmp_path / "shard"))
    assert os.pread(opened.descriptor, 7, 0) == b"content"
