"""What tests of Caffe's data layers have in common."""

from pathlib import Path

import pytest

from tests.golden.caffe.data_cases import write_all


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, which has the cases' files."""
    write_all(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path
