"""What a launch changes in its caller's process, and gives back."""

import logging
import os

import pytest

from firecaffe.cluster.addresses import LOOPBACK
from firecaffe.cluster.groups import ATTEMPT
from firecaffe.cluster.hosts import Hosts
from firecaffe.cluster.launch import MEETING_LOGGER, _environment, _silent, _words_of_ranks
from firecaffe.cluster.secret import SECRET

SET = "FIRECAFFE_TEST_SET"


def test_variables_of_others_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ATTEMPT, "before")
    monkeypatch.delenv(SECRET, raising=False)
    monkeypatch.setenv(SET, "")
    cleared: list[str] = []
    monkeypatch.setattr(os.environ, "clear", lambda: cleared.append("even for a moment"))
    with _environment(_words_of_ranks(Hosts(1), LOOPBACK, b"a secret")):
        assert os.environ[SECRET] == "a secret"
        os.environ[ATTEMPT] = "7"  # as the agent does
        os.environ[SET] = "by another thread"
    assert SECRET not in os.environ
    assert os.environ[ATTEMPT] == "before"
    assert os.environ[SET] == "by another thread"
    assert not cleared


def test_a_callers_words_for_ranks_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert _words_of_ranks(Hosts(1), LOOPBACK, b"a secret")["OMP_NUM_THREADS"] == "3"


def test_torchs_agent_alone_is_silent(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    torchs, own = logging.getLogger(f"{MEETING_LOGGER}.agent"), logging.getLogger("a caller's")
    before = logging.root.manager.disable
    with _silent(MEETING_LOGGER):
        assert logging.root.manager.disable == before
        torchs.error("many lines")
        own.error("one line")
    torchs.error("heard again")
    assert caplog.messages == ["one line", "heard again"]
    assert capsys.readouterr().err == ""
