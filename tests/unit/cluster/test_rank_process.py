"""Processes of ranks: how they end, and what is known of it."""

import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from firecaffe.cluster.rank_process import RankProcess

Start = Callable[[str], RankProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[RankProcess] = []

    def begin(program: str) -> RankProcess:
        command = [sys.executable, "-I", "-S", "-c", program]
        words, report = {"RANK": "3"}, tmp_path / "0" / "1.json"
        started.append(RankProcess.start(1, command, words, report))
        return started[-1]

    yield begin
    for each in started:
        each.kill()


def test_what_it_leaves_to_its_launcher(start: Start) -> None:
    said = {"message": {"message": "no", "extraInfo": {"timestamp": "7"}}}
    rank = start(
        "import json, os, sys\n"
        "assert os.environ['RANK'] == '3' and os.getsid(0) == os.getpid()\n"
        f"json.dump({json.dumps(said)}, open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w'))\n"
        "sys.exit(5)"
    )
    rank.process.wait()
    failure = rank.failure
    assert failure is not None
    assert (failure.local_rank, failure.exitcode, failure.error_file_data) == (1, 5, said)
    assert rank.seen().has_ended


def test_one_that_ends_well_has_no_failure(start: Start) -> None:
    rank = start("")
    rank.process.wait()
    assert (rank.has_ended, rank.is_stopped, rank.failure) == (True, False, None)
    rank.send(signal.SIGTERM)  # nobody is there, and nothing happens


def test_a_stopped_one_is_seen_and_can_be_killed(start: Start) -> None:
    rank = start("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)")
    while not rank.is_stopped:
        assert not rank.has_ended
    rank.kill()
    failure = rank.failure
    assert failure is not None
    assert failure.exitcode == -9
