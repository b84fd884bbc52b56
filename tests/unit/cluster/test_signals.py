"""Signals come back to whoever handled them; the agent ends once, at the first, with all its ranks;
and what is said of an error that a script does not catch.
"""

import io
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent, WorkerState
from torch.distributed.elastic.multiprocessing.api import SignalException

from firecaffe.cluster import agent as agents
from firecaffe.cluster import handover
from firecaffe.cluster.agent import SIGNALS, FaultAgent
from firecaffe.cluster.groups import ATTEMPT
from firecaffe.cluster.handover import report_uncaught
from firecaffe.cluster.process_settings import SAME_S, handlers_kept, heard
from firecaffe.cluster.rank_process import RankProcess
from firecaffe.errors import PeerLostError, RecipeError
from firecaffe.faults import Fault
from tests.typed import TIMEOUT_S, python

OF_C = """
import faulthandler, signal, sys
from firecaffe.cluster.process_settings import handlers_kept
with open(sys.argv[1], "w") as file:
    faulthandler.register(signal.SIGUSR1, file)
    for _ in range(2):
        heard = []
        with handlers_kept([signal.SIGUSR1]) as numbers:
            for number in numbers:
                signal.signal(number, lambda *_: heard.append(1))
            signal.raise_signal(signal.SIGUSR1)
        assert heard == [1]
        signal.raise_signal(signal.SIGUSR1)
"""


def test_a_handler_of_c_comes_back(tmp_path: Path) -> None:
    done = python("-c", OF_C, tmp_path / "told")  # where it does not, the signal ends the process
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "told").read_text().count("Current thread") == 2


def test_a_handler_of_python_comes_back_after_an_error() -> None:
    before = signal.getsignal(signal.SIGUSR1)

    def fails() -> None:
        with handlers_kept([signal.SIGUSR1]):
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
            raise ValueError("in the block")

    with pytest.raises(ValueError, match="in the block"):
        fails()
    assert signal.getsignal(signal.SIGUSR1) is before


def test_who_hears(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other thread does."""
    for number, handler, is_heard in (
        (signal.SIGHUP, signal.SIG_IGN, False),
        (signal.SIGHUP, signal.SIG_DFL, True),
        (signal.SIGINT, signal.SIG_IGN, True),
        (signal.SIGTERM, None, False),
    ):
        monkeypatch.setattr(signal, "getsignal", partial(lambda given, _: given, handler))
        assert heard([number]) == ([number] if is_heard else [])
    monkeypatch.undo()
    with ThreadPoolExecutor() as threads, handlers_kept([signal.SIGTERM]) as own:
        assert (own, threads.submit(handlers_of, signal.SIGTERM).result()) == ([signal.SIGTERM], [])


def handlers_of(number: signal.Signals) -> list[signal.Signals]:
    with handlers_kept([number]) as numbers:
        return [*numbers]


class Ranks:
    """Two processes as their starter knows them, and who lets them go."""

    def __init__(self) -> None:
        self.codes: list[int | None] = [None, None]
        self.ranks: set[int] = set()

    def process(self, rank: int) -> RankProcess:
        process = SimpleNamespace(pid=os.getpid(), poll=lambda: self.codes[rank])
        return RankProcess(rank, cast(Any, process), Path("none"))

    def look(self, seen: Any) -> bool:
        """Rank 0 takes its time to answer, and rank 1 is killed meanwhile."""
        if self.codes[1] is not None and seen[1].has_ended:
            self.ranks.add(1)
        self.codes[1] = -9
        return True


def bare_agent() -> Any:
    agent: Any = object.__new__(FaultAgent)
    agent.ended_by_us, agent._signal, agent._is_starting = set(), None, False
    agent._released, agent._ranks = None, {}
    return agent


def test_a_rank_that_ends_after_the_look_is_looked_at_again() -> None:
    ranks, agent = Ranks(), bare_agent()
    agent._released = ranks
    agent._ranks = {rank: ranks.process(rank) for rank in range(2)}
    for released in (set[int](), {1}):
        assert agent._monitor_workers(SimpleNamespace()).state == WorkerState.HEALTHY
        assert ranks.ranks == released


def test_signals_that_come_together_end_the_agent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second exception would leave torch's handling of the first half done."""
    now_s = 100.0
    monkeypatch.setattr(agents, "time", SimpleNamespace(monotonic=lambda: now_s))
    agent = bare_agent()
    with handlers_kept(SIGNALS):
        agent._start_workers(SimpleNamespace(workers=[], spec=None))
        with pytest.raises(SignalException) as ended:
            os.kill(os.getpid(), signal.SIGHUP)
        assert ended.value.sigval == signal.SIGHUP
        now_s += SAME_S
        os.kill(os.getpid(), signal.SIGTERM)
        now_s += SAME_S
        with pytest.raises(SignalException):
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    ("codes", "released", "is_done"),
    [
        ([0, 0], set[int](), True),
        ([0, -9], {1}, True),  # rank 0 has gone on without it
        ([0, -15], set[int](), False),
        ([-9, -9], {0, 1}, False),  # a host without ranks waits for the others
    ],
)
def test_a_signal_after_the_last_step_does_not_undo_the_run(
    codes: list[int], released: set[int], is_done: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that are asked to stop in the last evaluation end their work, with code 0."""

    def ended(*_: object) -> NoReturn:
        raise SignalException("asked", signal.SIGTERM)

    monkeypatch.setattr(SimpleElasticAgent, "run", ended)
    ranks, agent = Ranks(), bare_agent()
    ranks.codes, ranks.ranks = [*codes], released
    agent._released, agent._ranks = ranks, {rank: ranks.process(rank) for rank in range(2)}
    left: list[str] = []
    agent._exit_barrier = lambda: left.append("all hosts")
    with nullcontext() if is_done else pytest.raises(SignalException):
        assert agent.run().state == WorkerState.SUCCEEDED
    assert left == ["all hosts"] * is_done


def test_the_callers_handler_gets_a_signal_that_came_too_late_to_stop_the_run() -> None:
    """Else a program of several trainings would go on to the next one."""
    agent, got = bare_agent(), []
    with handlers_kept(SIGNALS):
        agent._signal = 0.0, signal.SIGTERM
        signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
        agent.raise_late_signal()
        assert got == [signal.SIGTERM]
        for default in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(signal.SIGTERM, default)
            agent.raise_late_signal()


class Interrupted:
    """Python drops what a destructor raises."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_that_comes_in_a_destructor_is_not_lost() -> None:
    agent = bare_agent()
    with handlers_kept(SIGNALS):
        agent._start_workers(SimpleNamespace(workers=[], spec=None))
        Interrupted()
        for look in (agent._monitor_workers, agent._restart_workers):
            with pytest.raises(SignalException) as ended:
                look(SimpleNamespace())
            assert ended.value.sigval == signal.SIGINT


def test_a_signal_leaves_no_rank_that_has_just_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes after the fork, before anybody knows of the process."""
    begun = []

    def start(local_rank: int, *_: object) -> RankProcess:
        begun.append(local_rank)
        os.kill(os.getpid(), signal.SIGINT)
        return Ranks().process(0)

    monkeypatch.setattr(RankProcess, "start", start)
    monkeypatch.setenv(ATTEMPT, "0")
    monkeypatch.setattr(FaultAgent, "_variables_of", lambda *_: {})
    agent = bare_agent()
    agent.reports = tmp_path
    workers = [SimpleNamespace(local_rank=rank, global_rank=rank) for rank in range(2)]
    spec = SimpleNamespace(entrypoint="rank", args=())
    with handlers_kept(SIGNALS):
        with pytest.raises(SignalException) as ended:
            agent._start_workers(SimpleNamespace(workers=workers, spec=spec))
        assert ended.value.sigval == signal.SIGINT
        assert sorted(agent._ranks) == begun == [0, 1]


MISTAKE = RecipeError("data.name is 'x'")


def test_what_nobody_caught_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also where torch's hook around ours gathers what is printed, and prints it when ours returns:
    `init_process_group` puts it there.
    """
    others: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda _, error, __: others.append(error))
    report_uncaught()
    report_uncaught()  # once is enough
    for stderr in (sys.stderr, io.StringIO()):
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stderr", stderr)
            with pytest.raises(SystemExit) as ended:
                sys.excepthook(RecipeError, MISTAKE, None)
            assert sys.stderr is stderr
        assert ended.value.code == RecipeError.exit_code
        assert capfd.readouterr().err == "firecaffe: data.name is 'x'\n"
    another = ValueError("the user's own")
    sys.excepthook(ValueError, another, None)
    assert others == [another]
    codes: list[int] = []
    monkeypatch.setattr(handover, "end_process", codes.append)
    lost = PeerLostError.of(Fault("killed", 1, "node-b", 4, "its launcher"))
    with pytest.raises(SystemExit):  # for the process has not ended here
        sys.excepthook(PeerLostError, lost, None)
    assert codes == [10]
    assert "rank 1 on node-b" in capfd.readouterr().err


MISTAKEN = """
from firecaffe.cluster.handover import report_uncaught
from firecaffe.errors import PeerLostError, RecipeError
from firecaffe.faults import Fault
report_uncaught()
raise RecipeError('mine')
"""
HELD = "print('still here')\n"
TYPED: dict[str, tuple[list[str], str, int]] = {
    "prompt": (["-i"], MISTAKEN + HELD, 0),
    "after a script": (["-i", "-c", MISTAKEN], HELD, 0),
    "code.interact": (["-c", "import code; code.interact()"], MISTAKEN + HELD, 0),
    "a script from stdin": (["-"], MISTAKEN + HELD, 2),
    "IPython": (["-m", "IPython", "--quick", "--colors=NoColor", "-c", MISTAKEN], "", 1),
}
"""A Python's words, what is typed to it, and its exit code: at a prompt all that it holds stays."""


@pytest.mark.parametrize("how", TYPED)
def test_a_prompt_stays_with_all_that_it_holds(how: str) -> None:
    words, lines, code = TYPED[how]
    if how == "IPython":
        pytest.importorskip("IPython", reason="needs IPython: pip install -e '.[dev]'")
    ends: Any = {"capture_output": True, "text": True, "timeout": TIMEOUT_S}
    done = subprocess.run([sys.executable, *words], input=lines, check=False, **ends)
    assert done.returncode == code, done.stderr
    assert done.stdout.count("still here") == (code == 0)
    assert (done.stdout + done.stderr).count("firecaffe: mine\n") == 1
    assert "Traceback" not in done.stdout + done.stderr
