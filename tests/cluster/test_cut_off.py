"""Hosts that lose each other: each tells its own ranks' verdict, with its code, and ends.

Each case is in a process of its own, whose launchers need not load torch (`tests.typed`).
"""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from benchmarks.cluster_run import Rank
from benchmarks.small_run import RECIPE, command, steps_of
from benchmarks.virtual_cluster import VirtualCluster
from firecaffe.cluster.hosts import TOGETHER_S
from tests.typed import python

WAIT_S = 600.0
"""For what comes at once, unless it never comes."""


def start(net: VirtualCluster, folder: Path, *more: str, steps: int = 5000) -> list[Rank]:
    """Two hosts' launchers, once their ranks have taken steps together. more: words."""
    recipe, run = folder / "recipe.toml", folder / "run"
    recipe.write_text(RECIPE)
    words = ["--train.steps", str(steps), "--checkpoint.every", "5", "--exchange.silent_s", "4"]
    words += more
    words += ["--nnodes", "2", "--rdzv-id", "m", "--rdzv-endpoint", f"{net.address(0)}:29400"]
    launchers = []
    for host in range(2):
        launchers.append(Rank(host, net.namespaces[host], command(recipe, run, 1, *words), {}))
        net._ranks.append(launchers[-1])  # so that it goes with the cluster
    until = time.monotonic() + WAIT_S
    while max(steps_of(run), default=0) < 10:
        assert time.monotonic() < until, [each.stderr for each in launchers]
        time.sleep(0.05)
    return launchers


def verdict(launcher: Rank) -> str:
    """The one line of ours on stderr."""
    (line,) = [line for line in launcher.stderr.splitlines() if line.startswith("firecaffe")]
    return line


def of_two_hosts(case: str, folder: Path) -> None:
    """One of the functions below, on two hosts."""
    with VirtualCluster(2, 1_000_000_000) as net:
        globals()[case](net, folder)


def check(case: str, folder: Path) -> None:
    program = "import sys, pathlib; from tests.cluster.test_cut_off import of_two_hosts"
    done = python("-c", f"{program}; of_two_hosts({case!r}, pathlib.Path(sys.argv[1]))", folder)
    assert done.returncode == 0, done.stderr


def a_cut_link_is_told_on_both_sides(net: VirtualCluster, folder: Path) -> None:
    launchers = start(net, folder)
    net.link_down(0)
    for launcher, other in zip(launchers, (1, 0), strict=True):
        assert launcher.wait(WAIT_S) == 12, launcher.stderr
        assert f"rank {other} on" in verdict(launcher)
        assert "cannot be reached" in verdict(launcher)
    (line,) = launchers[1].stdout.splitlines()
    assert "rank 1 of 2; rank 0 on" in line
    assert str(folder / "run") in line


def a_launcher_that_is_gone_with_the_meeting_place_is_told(
    net: VirtualCluster, folder: Path
) -> None:
    launchers = start(net, folder)
    os.kill(launchers[0].pid, signal.SIGKILL)
    assert launchers[1].wait(WAIT_S) == 75, launchers[1].stderr
    assert "a checkpoint is saved" in verdict(launchers[1])


def the_death_of_the_host_of_the_endpoint_is_told(net: VirtualCluster, folder: Path) -> None:
    launchers = start(net, folder)
    listed = subprocess.run(
        ["ip", "netns", "pids", net.namespaces[0]], capture_output=True, text=True, check=True
    )
    for pid in listed.stdout.split():
        os.kill(int(pid), signal.SIGKILL)
    other = launchers[1]
    assert other.wait(WAIT_S) == 9, other.stderr
    assert "rank 0 on" in verdict(other)
    assert "went away" in verdict(other)


@pytest.mark.parametrize(
    "case",
    [
        "a_cut_link_is_told_on_both_sides",
        "a_launcher_that_is_gone_with_the_meeting_place_is_told",
        "the_death_of_the_host_of_the_endpoint_is_told",
    ],
)
def test_a_host_that_is_lost(can_emulate: None, case: str, tmp_path: Path) -> None:
    check(case, tmp_path)


def a_server_goes_on_without_a_host(net: VirtualCluster, folder: Path) -> None:
    """And its launcher does not wait for that host's at the end."""
    words = "--synchrony.mode", "asynchronous", "--solver.base_lr", "0.001"
    of_rank_0, other = start(net, folder, *words, steps=200)
    net.link_down(1)
    assert of_rank_0.wait(TOGETHER_S / 2) == 0, of_rank_0.stderr
    assert "rank 1 is lost, and its micro-batches go to others: rank 1 on" in of_rank_0.stdout
    assert steps_of(folder / "run")[-1] == 200
    assert other.wait(WAIT_S) == 12, other.stderr


@pytest.mark.alone
def test_a_server_that_loses_a_host(can_emulate: None, tmp_path: Path) -> None:
    check("a_server_goes_on_without_a_host", tmp_path)
