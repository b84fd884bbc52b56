"""What a launch changes in its caller's process, and gives back; what it hands to its ranks; their
processes, how they end, and what is known of it.
"""

import json
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
from torch._C._distributed_c10d import HashStore
from torch.distributed import DistStoreError
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerState,
)
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
)

from firecaffe.cluster import groups, launcher
from firecaffe.cluster.addresses import LOOPBACK
from firecaffe.cluster.agent import FaultAgent
from firecaffe.cluster.calls import SideThread
from firecaffe.cluster.groups import ATTEMPT, agree_on_attempt, register_rank
from firecaffe.cluster.handover import HANDED, LAUNCHED, hand, handed
from firecaffe.cluster.hosts import Hosts, Rendezvous
from firecaffe.cluster.launcher import (
    MEETING_LOGGER,
    RankFailedError,
    _environment,
    _Launch,
    _silent,
    _variables_of_ranks,
    launch,
)
from firecaffe.cluster.lost_ranks import ReleasedRanks
from firecaffe.cluster.process_settings import exclusive_in_process
from firecaffe.cluster.rank_process import RankFailure, RankProcess
from firecaffe.cluster.secret import SECRET
from firecaffe.cluster.world import FOLDER
from firecaffe.errors import AgreementError, LaunchError, PreemptedError, RecipeError

SET = "FIRECAFFE_TEST_SET"


def test_variables_of_others_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ATTEMPT, "before")
    monkeypatch.delenv(SECRET, raising=False)
    monkeypatch.setenv(SET, "")
    cleared: list[str] = []
    monkeypatch.setattr(os.environ, "clear", lambda: cleared.append("even for a moment"))
    with _environment(_variables_of_ranks(Hosts(1), LOOPBACK, b"a secret")):
        assert os.environ[SECRET] == "a secret"
        os.environ[ATTEMPT] = "7"  # as the agent does
        os.environ[SET] = "by another thread"
        assert "OMP_NUM_THREADS" in os.environ
    assert SECRET not in os.environ
    assert os.environ[ATTEMPT] == "before"
    assert os.environ[SET] == "by another thread"
    assert not cleared
    for name in ("OMP_NUM_THREADS", "PYTHONHASHSEED", "GLIBC_TUNABLES"):
        assert name in _variables_of_ranks(Hosts(1), LOOPBACK, b"a secret")
        monkeypatch.setenv(name, "3")  # a caller's word for ranks is kept
        assert _variables_of_ranks(Hosts(1), LOOPBACK, b"a secret")[name] == "3"


def test_one_thread_launches_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two would give back each other's variables."""
    before, begun = dict(os.environ), list[object]()
    monkeypatch.setattr("firecaffe.cluster.launcher._Launch", begun.append)
    with exclusive_in_process("launch"), ThreadPoolExecutor(1) as threads:
        second = threads.submit(launch, ["train"], Hosts(1))
        with pytest.raises(RecipeError, match="another thread"):
            second.result()
    assert (dict(os.environ), begun) == (before, [])


def bare_launch(store: object = None, **of_agent: object) -> _Launch:
    launch = _Launch.__new__(_Launch)
    group = SimpleNamespace(store=store)
    agent = SimpleNamespace(get_worker_group=lambda: group, ended_by_us=set(), **of_agent)
    launch.agent, launch.settle = cast("FaultAgent", agent), lambda _, fault, __: fault
    launch.known_folders, launch.has_patience, launch.has_asked = [], True, False
    launch.killed_before = 0
    return launch


def test_the_runs_folder_is_had_though_a_question_before_is_overdue() -> None:
    """A busy host: the store answers late. The folder is remembered when the store is gone."""
    store = HashStore()
    store.set(f"{FOLDER}/0", "/runs/1")
    launch = bare_launch(SimpleNamespace(underlying_store=store))
    answered = threading.Event()
    with SideThread() as launch.aside:
        with pytest.raises(TimeoutError):
            launch.aside.run(answered.wait, 0.0)
        threading.Timer(0.05, answered.set).start()
        assert launch._folders() == [Path("/runs/1")]
        launch.agent.get_worker_group().store = None
        assert launch._folders() == [Path("/runs/1")]


def test_a_rank_that_was_asked_to_stop_is_told_as_the_launcher_would_be(tmp_path: Path) -> None:
    launch = bare_launch()
    asked = RankFailure(0, 1, PreemptedError.exit_code, str(tmp_path / "none"))
    with SideThread() as launch.aside:
        error = launch._told({0: asked}, "the run ended")
    assert type(error) is PreemptedError


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (RendezvousConnectionError("see inner exception"), "no launcher"),
        (RendezvousClosedError(), "has ended"),
        (DistStoreError("wait timeout after 60000ms, keys: /none/..."), "did not answer"),
    ],
)
def test_hosts_that_cannot_meet_again_are_told_where_and_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], error: Exception, word: str
) -> None:
    lost = RankFailure(0, 1, 9, str(tmp_path / "none"))

    def run() -> None:
        raise error

    launch = bare_launch(last_failures={0: lost}, run=run)
    launch.met = cast("Rendezvous", SimpleNamespace(shutdown=bool))
    launch.hosts = Hosts(1, 1, 2, "node-a:29500", "run")
    with SideThread() as launch.aside, pytest.raises(RankFailedError):
        launch._run()
    said = capsys.readouterr().err
    assert all(part in said for part in ("meet again", "node-a:29500", word))


@pytest.mark.parametrize(("released", "then"), [({1}, "the others go on"), ((), "the run ended")])
def test_what_follows_the_loss_of_a_hosts_ranks(
    tmp_path: Path, released: Iterable[int], then: str
) -> None:
    """A server goes on without them, though their launcher does not see how it ends."""
    lost = RankFailure(0, 1, 9, str(tmp_path / "none"))
    ends = {"run": lambda: RunResult(WorkerState.FAILED), "part": bool, "is_refused": False}
    launch = bare_launch(last_failures={1: lost}, released={*released}, **ends)
    launch.met = cast("Rendezvous", SimpleNamespace(shutdown=bool))
    launch.holds_store = False
    launch.settle = settle = Mock(side_effect=lambda _, fault, __: fault)
    with SideThread() as launch.aside, pytest.raises(RankFailedError):
        launch._run()
    assert settle.call_args.args[2] == then


@pytest.mark.parametrize("code", [AgreementError.exit_code, LaunchError.exit_code])
@pytest.mark.parametrize(
    ("hosts", "attempt", "goes_on", "is_refused"),
    [
        (["ab", "abc"], 1, True, False),  # this host was there when one more came
        (["abc"], 1, False, True),  # this host is that one
        (["abc"], 0, False, False),  # all have come to the start
        (["ab", "abc", "ab"], 2, False, False),  # it is no fault of one that came
    ],
)
def test_a_late_host_that_cannot_join_ends_alone(
    hosts: list[str], attempt: int, goes_on: bool, is_refused: bool, code: int, tmp_path: Path
) -> None:
    """It has another recipe, or reaches the endpoint alone."""
    agent = FaultAgent.__new__(FaultAgent)
    agent.is_elastic, agent._hosts, agent.ended_by_us = True, frozenset(), set()
    agent._signal, agent._remaining_restarts = None, 2
    for there in hosts:
        agent._note_hosts(frozenset(there), attempt)
    ended: Any = SimpleNamespace(pid=1, poll=lambda: code)
    agent._ranks = {0: RankProcess(0, ended, tmp_path / "none")}
    agent._released = cast(ReleasedRanks, SimpleNamespace(look=lambda _: True, ranks=set()))
    group = cast(WorkerGroup, SimpleNamespace(spec=SimpleNamespace(max_restarts=2)))
    agent._monitor_workers(group)
    assert (agent._is_left, agent.is_refused) == (goes_on, is_refused)
    may_pass = code == LaunchError.exit_code and attempt > 0 and not is_refused
    assert agent._remaining_restarts == (3 if goes_on else 2 if may_pass else 0)


@pytest.mark.parametrize(
    ("is_elastic", "restarts", "goes_on"), [(True, 0, True), (False, 1, True), (False, 0, False)]
)
def test_a_host_that_is_lost_while_hosts_meet_ends_no_run_that_may_wait_for_another(
    monkeypatch: pytest.MonkeyPatch, is_elastic: bool, restarts: int, goes_on: bool
) -> None:
    """It has joined, and the others wait in vain for its number of ranks."""
    outcomes = iter([DistStoreError("wait timeout"), None])

    def meet(*_: object) -> None:
        if (error := next(outcomes)) is not None:
            raise error

    agent = FaultAgent.__new__(FaultAgent)
    agent.is_elastic, agent._remaining_restarts = is_elastic, restarts
    begun: list[object] = []
    monkeypatch.setattr(SimpleElasticAgent, "_rendezvous", meet)
    monkeypatch.setattr(FaultAgent, "_begin_attempt", lambda _, group: begun.append(group))
    group = cast(WorkerGroup, "a group")
    expected: AbstractContextManager[object] = nullcontext()
    if not goes_on:
        expected = pytest.raises(DistStoreError)
    with SideThread() as agent.aside, expected:
        agent._rendezvous(group)
    assert begun == [group] * goes_on


def test_hosts_meet_again_once_the_link_to_the_store_is_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A question of the attempt before was still unanswered when the ranks had lost each other."""
    agent, is_back = FaultAgent.__new__(FaultAgent), threading.Event()
    begun: list[object] = []
    monkeypatch.setattr(SimpleElasticAgent, "_rendezvous", lambda *_: None)
    monkeypatch.setattr(FaultAgent, "_begin_attempt", lambda _, group: begun.append(group))
    launch = bare_launch()
    launch.hosts = Hosts(1, 2, 2, "node-a:29500", "run")
    launch.met = cast("Rendezvous", SimpleNamespace(participants={}))
    with SideThread() as launch.aside:
        agent.aside = launch.aside
        with pytest.raises(TimeoutError):
            agent.aside.run(is_back.wait, 0.0)
        launch.on_waiting(10.0)
        assert "waiting for an answer at node-a:29500" in capsys.readouterr().err
        threading.Timer(0.05, is_back.set).start()
        agent._rendezvous(cast(WorkerGroup, "a group"))
    assert begun == ["a group"]


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


def test_ranks_find_what_a_launcher_has_handed_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LAUNCHED, str(os.getpid()))
    for value in ({"a": [1, 2.5]}, None):
        for word, text in hand(value, tmp_path).items():
            monkeypatch.setenv(word, text)
        assert handed() == value
    monkeypatch.setenv(HANDED, str(tmp_path / "handed"))
    monkeypatch.delenv(LAUNCHED)
    assert handed() is None


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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_hosts_are_waited_for_leaves_nothing(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(launcher, "meet_launchers", lambda *_: os.kill(os.getpid(), number))
    before = signal.signal(number, lambda *_: None)
    try:
        with pytest.raises(RankFailedError) as ended:
            launch(["train"], Hosts(), for_ranks="all of it")
    finally:
        signal.signal(number, before)
    assert ended.value.exit_code == 128 + number
    assert number.name in str(ended.value)
    assert not list(tmp_path.iterdir())


SHORT, LONG = timedelta(seconds=0.1), timedelta(seconds=300)


def said_by(ranks: Sequence[int], world_size: int, timeout: timedelta) -> list[str]:
    """What each of these ranks is told, as threads."""
    store = HashStore()

    def call(rank: int) -> str:
        try:
            register_rank(store, rank, world_size, timeout)
        except LaunchError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(call, ranks))


def test_the_missing_are_named_to_all_others() -> None:
    assert said_by([2, 0, 1], 3, LONG) == ["", "", ""]
    for said in said_by([0, 2], 4, SHORT):
        assert "2 of WORLD_SIZE=4" in said
        assert "no rank 1, 3" in said


def test_who_is_there_twice_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = iter(["node-a", "node-b"])
    monkeypatch.setattr(groups, "_myself", lambda: {"host": next(hosts), "pid": 1})
    for said in said_by([0, 0], 2, LONG):
        assert "RANK=0" in said
        assert "node-a and node-b" in said or "node-b and node-a" in said


def test_a_rank_that_was_started_again_is_not_there_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    dead = {"host": socket.gethostname(), "pid": 1 << 30}
    monkeypatch.setattr(groups, "_myself", lambda: dead)
    with ThreadPoolExecutor() as threads:
        threads.submit(register_rank, store, 1, 2, LONG)
        store.wait(["here/1"], LONG)
        monkeypatch.undo()
        again = threads.submit(register_rank, store, 1, 2, LONG)
        register_rank(store, 0, 2, LONG)
        again.result()


def test_ranks_of_an_attempt_agree_on_its_number() -> None:
    """Whoever comes first, in a store that has what earlier attempts said."""
    store = HashStore()
    with ThreadPoolExecutor() as threads:
        for number, order in enumerate([(0, 1, 2), (2, 1, 0), (1, 0, 2)]):
            called = [threads.submit(agree_on_attempt, store, rank, 3, LONG) for rank in order]
            assert [call.result() for call in called] == [number] * 3
    with pytest.raises(LaunchError, match="not all ranks came"):
        agree_on_attempt(store, 1, 3, SHORT)
    with pytest.raises(LaunchError, match="rank 1, 2 did not come"):
        agree_on_attempt(store, 0, 3, SHORT)
