"""Hosts leave, come and lose each other while a run goes on: to the bits of one worker, or to each
one's own verdict.

Each case is in a process of its own, whose launchers need not load torch (`tests.typed`).
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.emulated.cluster_run import Rank
from benchmarks.emulated.virtual_cluster import VirtualCluster
from benchmarks.kit.small_run import RECIPE, command, state_of, steps_of
from firecaffe.cluster.hosts import TOGETHER_S
from firecaffe.runs.run_folder import read_run_file
from tests.typed import python

WAIT_S = 600.0
"""For what comes at once, unless it never comes."""

FAST, SLOW = 1_000_000_000, 200_000_000
"""Bits a second. The slow one lets steps take a seventh of a second, in which hosts mostly wait and
not compute: they leave and come meanwhile. The rest of the steps has the fast one.
"""


def check(case: Callable[..., None], folder: Path, *numbers: int) -> None:
    """Runs one of the functions below."""
    program = f"import sys, pathlib; from {__name__} import {case.__name__} as case"
    call = f"case(pathlib.Path(sys.argv[1]), *{numbers})"
    done = python("-c", f"{program}; {call}", folder)
    assert done.returncode == 0, done.stderr


class Hosts:
    """Launchers of one run on the hosts of an emulated cluster, with which they go."""

    def __init__(self, net: VirtualCluster, folder: Path, nnodes: str, *words: str) -> None:
        self.net, self.run = net, folder / "run"
        recipe = folder / "recipe.toml"
        recipe.write_text(RECIPE)
        place = f"{net.address(0)}:29400"
        meeting = ("--nnodes", nnodes, "--rdzv-id", "m", "--rdzv-endpoint", place)
        self.command = command(recipe, self.run, 1, *words, *meeting)
        self.launchers: list[Rank] = []

    def come(self, host: int) -> Rank:
        launcher = Rank(host, self.net.namespaces[host], self.command, {})
        self.launchers.append(launcher)
        self.net._ranks.append(launcher)
        return launcher

    def last_step(self) -> int:
        return max(steps_of(self.run), default=0)

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        until = time.monotonic() + WAIT_S
        while not is_so():
            said = "\n".join(f"{e.stdout[-2000:]}\n{e.stderr[-2000:]}" for e in self.launchers)
            assert time.monotonic() < until, said
            time.sleep(0.05)

    def kill(self, host: int) -> None:
        """All that runs there."""
        words = ["ip", "netns", "pids", self.net.namespaces[host]]
        listed = subprocess.run(words, capture_output=True, text=True, check=True)
        for pid in listed.stdout.split():
            os.kill(int(pid), signal.SIGKILL)


def alone(folder: Path, *words: str) -> str:
    """The state that one worker ends with."""
    recipe, run = folder / "alone.toml", folder / "alone"
    recipe.write_text(RECIPE)
    training = command(recipe, run, 1, *words)
    subprocess.run(training, check=True, capture_output=True, timeout=WAIT_S)
    return state_of(run)


def verdict(launcher: Rank) -> str:
    """The one line of ours on stderr."""
    (line,) = [line for line in launcher.stderr.splitlines() if line.startswith("firecaffe")]
    return line


def two_hosts(net: VirtualCluster, folder: Path, *more: str, steps: int = 5000) -> Hosts:
    """Two hosts, once their ranks have taken steps together. more: words."""
    words = ("--train.steps", str(steps), "--checkpoint.every", "5", "--exchange.silent_s", "3")
    hosts = Hosts(net, folder, "2", *words, *more)
    for host in range(2):
        hosts.come(host)
    hosts.wait_until(lambda: hosts.last_step() >= 10)
    return hosts


def a_link_is_cut(folder: Path) -> None:
    with VirtualCluster(2, FAST) as net:
        launchers = two_hosts(net, folder).launchers
        net.link_down(0)
        for launcher, other in zip(launchers, (1, 0), strict=True):
            assert launcher.wait(WAIT_S) == 12, launcher.stderr
            assert f"rank {other} on" in verdict(launcher)
            assert "cannot be reached" in verdict(launcher)
        (line,) = launchers[1].stdout.splitlines()
        assert "rank 1 of 2; rank 0 on" in line
        assert str(folder / "run") in line


def a_launcher_is_gone_with_the_meeting_place(folder: Path) -> None:
    with VirtualCluster(2, FAST) as net:
        first, other = two_hosts(net, folder).launchers
        os.kill(first.pid, signal.SIGKILL)
        assert other.wait(WAIT_S) == 75, other.stderr
        assert "a checkpoint is saved" in verdict(other)


def the_host_of_the_endpoint_dies(folder: Path) -> None:
    with VirtualCluster(2, FAST) as net:
        hosts = two_hosts(net, folder)
        hosts.kill(0)
        other = hosts.launchers[1]
        assert other.wait(WAIT_S) == 9, other.stderr
        assert "rank 0 on" in verdict(other)
        assert "went away" in verdict(other)


@pytest.mark.parametrize(
    "case",
    [a_link_is_cut, a_launcher_is_gone_with_the_meeting_place, the_host_of_the_endpoint_dies],
)
def test_a_host_that_is_lost(
    can_emulate: None, case: Callable[[Path], None], tmp_path: Path
) -> None:
    check(case, tmp_path)


def a_server_goes_on_without_a_host(folder: Path) -> None:
    with VirtualCluster(2, FAST) as net:
        words = "--synchrony.mode", "asynchronous", "--solver.base_lr", "0.001"
        hosts = two_hosts(net, folder, *words, steps=200)
        of_rank_0, other = hosts.launchers
        net.link_down(1)
        assert of_rank_0.wait(TOGETHER_S / 2) == 0, of_rank_0.stderr
        assert "rank 1 is lost, and its micro-batches go to others: rank 1 on" in of_rank_0.stdout
        assert hosts.last_step() == 200
        assert other.wait(WAIT_S) == 12, other.stderr


@pytest.mark.alone
def test_a_server_that_loses_a_host(can_emulate: None, tmp_path: Path) -> None:
    """And its launcher does not wait for that host's at the end."""
    check(a_server_goes_on_without_a_host, tmp_path)


STEPS = 240


def hosts_leave_and_come(folder: Path, count: int) -> None:
    words: tuple[str, ...] = ("--train.steps", str(STEPS), "--checkpoint.every", "60")
    words += ("--train.global_batch_size", "8", "--train.micro_batch_size", "2")
    expected = alone(folder, *words)
    with VirtualCluster(count, SLOW) as net:
        hosts = Hosts(net, folder, f"2:{count}", *words, "--max-restarts", "3")

        def trains_with(size: int, after: int) -> None:
            """Until so many hosts have taken steps together."""
            name = f"lenet-{size}w"
            hosts.wait_until(lambda: any(name in each.stdout for each in hosts.launchers))
            hosts.wait_until(lambda: hosts.last_step() > after + 5)

        for host in range(count):
            hosts.come(host)
        trains_with(count, 0)
        stay, leave = hosts.launchers[:2], hosts.launchers[2:]
        for launcher in leave:
            os.kill(launcher.pid, signal.SIGTERM)
        for launcher in leave:
            assert launcher.wait(WAIT_S) == 75, launcher.stderr
        trains_with(2, hosts.last_step())
        for host in range(2, count):
            stay.append(hosts.come(host))
            trains_with(host + 1, hosts.last_step())
        assert hosts.last_step() < STEPS, "the run was over before all were there again"
        for host in range(count):
            net.set_rate(host, FAST)
        for launcher in stay:
            assert launcher.wait(WAIT_S) == 0, launcher.stderr
    lines = [line for each in hosts.launchers for line in each.stdout.splitlines()]
    worlds = {line.split("w ")[0] for line in lines if line.startswith("lenet-")}
    assert worlds == {f"lenet-{size}" for size in range(2, count + 1)}
    assert read_run_file(hosts.run, "result.json")["world_size"] == count
    assert state_of(hosts.run) == expected
    assert steps_of(hosts.run) == list(range(1, STEPS + 1))


@pytest.mark.parametrize("count", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_all_then_two_then_one_more_each_time(
    can_emulate: None, tmp_path: Path, count: int
) -> None:
    """With 3 hosts 3, 2, 3; with 4 hosts 4, 2, 3, 4."""
    check(hosts_leave_and_come, tmp_path, count)


def two_hosts_go_on_with_three_replicas(folder: Path) -> None:
    words: tuple[str, ...] = ("--train.steps", "96", "--checkpoint.every", "4")
    words += ("--synchrony.mode", "local", "--synchrony.replicas", "3")
    words += ("--synchrony.local_steps", "4")
    expected = alone(folder, *words)
    with VirtualCluster(3, FAST) as net:
        hosts = Hosts(net, folder, "2:3", *words, "--max-restarts", "1")
        first, second, _ = [hosts.come(host) for host in range(3)]
        hosts.wait_until(lambda: hosts.last_step() > 8)
        assert hosts.last_step() < 96, "the run was over before a host was lost"
        hosts.kill(2)
        for launcher in (first, second):
            assert launcher.wait(WAIT_S) == 0, launcher.stderr
    assert read_run_file(hosts.run, "result.json")["world_size"] == 2
    assert state_of(hosts.run) == expected
    assert steps_of(hosts.run) == list(range(1, 97))


def test_the_replicas_of_a_lost_host_go_to_the_others(can_emulate: None, tmp_path: Path) -> None:
    check(two_hosts_go_on_with_three_replicas, tmp_path)
