"""What a launcher hands to its ranks."""

import os
from pathlib import Path

import pytest

from firecaffe.cluster.handover import HANDED, hand, handed
from firecaffe.cluster.last_word import LAUNCHED


def test_ranks_find_what_was_handed_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LAUNCHED, str(os.getpid()))
    for value in ({"a": [1, 2.5]}, None):
        for word, text in hand(value, tmp_path).items():
            monkeypatch.setenv(word, text)
        assert handed() == value


def test_what_no_launcher_has_handed_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HANDED, str(tmp_path / "handed"))
    monkeypatch.delenv(LAUNCHED, raising=False)
    assert handed() is None
