"""What another system than Linux is told, and what does without Linux's calls."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from firecaffe import why_not
from firecaffe.data.shard_files import _Opened


def test_windows_alone_is_refused_in_one_line() -> None:
    assert "WSL" in why_not("win32")
    assert why_not("linux") == why_not("darwin") == ""
    codes = (
        "import runpy; runpy.run_module('firecaffe', run_name='__main__')",
        "from firecaffe import train",
    )
    for code, start in zip(codes, ("firecaffe", "ImportError"), strict=True):
        command = [sys.executable, "-c", f"import sys; sys.platform = 'win32'; {code}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == (2 if start == "firecaffe" else 1)
        assert done.stderr.splitlines()[-1] == f"{start}: {why_not('win32')}"
        assert (len(done.stderr.splitlines()), done.stdout) == (1, "") or start == "ImportError"


def test_packed_data_are_read_where_the_system_takes_no_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As macOS."""
    monkeypatch.delattr(os, "posix_fadvise")
    (tmp_path / "shard").write_bytes(b"content")
    opened = _Opened(str(tmp_path / "shard"))
    assert os.pread(opened.descriptor, 7, 0) == b"content"
