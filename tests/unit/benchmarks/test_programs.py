"""Programs of benchmarks: emulated clusters, how starts are timed, and faults that can be made."""

import re
import sys
from pathlib import Path

import pytest

from benchmarks.emulated.namespaces import ClusterError
from benchmarks.emulated.processors import bound
from benchmarks.emulated.virtual_cluster import VirtualCluster, parse_rate
from benchmarks.faults.on_purpose import VARIABLE, environment
from benchmarks.planted_faults import ROOT, Fault, faults
from benchmarks.training import as_typed_ddp, starts, starts_ddp
from benchmarks.training.starts import check_network, timed
from firecaffe.cli import main
from firecaffe.training.plugins import VARIABLE as PLUGINS


def test_what_an_emulated_cluster_is_asked_for() -> None:
    """Rates; and a share that the kernel cannot give is refused before anything is made."""
    for text, bits_per_s in (("200mbit", 2e8), ("2.5Gbit", 2.5e9), ("64kbit", 64e3), ("9bit", 9)):
        assert parse_rate(text) == bits_per_s
    with pytest.raises(ClusterError, match=r"0\.05 processors for each host; 0\.1 is the least"):
        VirtualCluster(16, 100_000_000, processors=0.05)


def test_whole_processors_are_bound_while_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {2, 3, 5})
    assert bound([1, 0.5, 2]) == {0: {2}, 2: {3, 5}}
    assert bound([2, 2]) == {0: {2, 3}}


def test_the_bare_scripts_network_is_nin_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing of firecaffe is loaded."""
    check_network()
    monkeypatch.setattr(starts, "build_model", lambda name: starts_ddp.network()[:-3])
    with pytest.raises(SystemExit, match="nin_small"):
        check_network()
    for module in (starts_ddp, as_typed_ddp):
        source = Path(str(module.__file__)).read_text("utf-8")
        assert re.findall(r"^ *(?:from|import) firecaffe", source, re.M) == []


def test_core_seconds_are_those_of_a_commands_children_too() -> None:
    spin = "import time\nwhile time.process_time() < 0.2: pass"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {spin!r}])"
    took = timed([sys.executable, "-c", child])
    assert took.core_s >= 0.2
    assert took.wall_s > 0
    with pytest.raises(SystemExit, match="exit code 3"):
        timed([sys.executable, "-c", "raise SystemExit(3)"])


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([], ["names no fault"]),
        (["nap"], ["no kind 'nap'", "kill, freeze"]),
        (["kill:rank=x"], ["rank is 'x'", "must be a whole number"]),
        (["kill:when=3"], ["no word 'when'", "rank, step"]),
        (["kill:step=0"], ["step and factor from 1"]),
        (["slow:factor=nan"], ["step and factor from 1"]),
        (["kill:rank=3"], ["rank is 3", "ranks 0 to 0"]),
        (["preempt", "kill:rank=3"], ["kill: rank is 3"]),
        (["link_cut:rank=0"], ["emulated cluster"]),
    ],
    ids=" ".join,
)
def test_one_that_cannot_happen_is_refused(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    parts: list[str],
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr("firecaffe.cluster.agent.FaultAgent.run", refuse)
    monkeypatch.setenv(PLUGINS, environment("kill")[PLUGINS])
    monkeypatch.setenv(VARIABLE, " ".join(words))
    assert main(["train", str(ROOT / "recipes/lenet_fashion.toml")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    for part in (VARIABLE, *parts):
        assert part in line


@pytest.mark.parametrize("fault", faults(), ids=lambda fault: fault.name)
def test_a_fault_can_be_planted(fault: Fault) -> None:
    assert (ROOT / fault.file).read_text("utf-8").count(fault.old) == 1
    assert all((ROOT / path).exists() for path in fault.tests)
