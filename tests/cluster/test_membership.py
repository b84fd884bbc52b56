"""Hosts leave and come while a run goes on, to the bits of one worker."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.cluster_run import Rank
from benchmarks.small_run import RECIPE, command, state_of, steps_of
from benchmarks.virtual_cluster import VirtualCluster
from tests.typed import python

STEPS = 240
RATE_BITS_PER_S = 200_000_000
"""So slow that steps take a seventh of a second, in which hosts mostly wait and not compute: they
leave and come meanwhile.
"""
TIMEOUT_S = 600.0

WORDS = (
    *("--train.steps", str(STEPS), "--checkpoint.every", "60"),
    *("--train.global_batch_size", "8", "--train.micro_batch_size", "2"),
)


def last_step(folder: Path) -> int:
    return max(steps_of(folder), default=0)


def wait_until(is_so: Callable[[], bool], launchers: list[Rank]) -> None:
    until = time.monotonic() + TIMEOUT_S
    while not is_so():
        said = "\n".join(f"{each.stdout[-2000:]}\n{each.stderr[-2000:]}" for each in launchers)
        assert time.monotonic() < until, said
        time.sleep(0.05)


@pytest.mark.parametrize("hosts", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_all_then_two_then_one_more_each_time(
    can_emulate: None, tmp_path: Path, hosts: int
) -> None:
    """With 3 hosts 3, 2, 3; with 4 hosts 4, 2, 3, 4. In a process of its own: see `tests.typed`."""
    script = "import sys, pathlib; from tests.cluster.test_membership import leave_and_come"
    done = python("-c", f"{script}; leave_and_come(pathlib.Path(sys.argv[1]), {hosts})", tmp_path)
    assert done.returncode == 0, done.stderr


def leave_and_come(tmp_path: Path, hosts: int) -> None:
    with VirtualCluster(hosts, RATE_BITS_PER_S) as net:
        leave_and_come_on(net, tmp_path, hosts)


def leave_and_come_on(net: VirtualCluster, tmp_path: Path, hosts: int) -> None:
    recipe, folder = tmp_path / "recipe.toml", tmp_path / "run"
    recipe.write_text(RECIPE)
    alone = tmp_path / "alone"
    subprocess.run(
        command(recipe, alone, 1, *WORDS), check=True, capture_output=True, timeout=TIMEOUT_S
    )

    meeting = ["--nnodes", f"2:{hosts}", "--max-restarts", "3", "--rdzv-id", "members"]
    meeting += ["--rdzv-endpoint", f"{net.address(0)}:29400"]

    launchers: list[Rank] = []

    def come(host: int) -> Rank:
        launcher = Rank(
            host, net.namespaces[host], command(recipe, folder, 1, *WORDS, *meeting), {}
        )
        launchers.append(launcher)
        net._ranks.append(launcher)  # so that it goes with the cluster
        return launcher

    def trains_with(hosts: int, after: int) -> None:
        """Until so many hosts have taken steps together."""
        words = f"lenet-{hosts}w"
        wait_until(lambda: any(words in each.stdout for each in launchers), launchers)
        wait_until(lambda: last_step(folder) > after + 20, launchers)

    for host in range(hosts):
        come(host)
    trains_with(hosts, 0)
    stay, leave = launchers[:2], launchers[2:]
    for launcher in leave:
        os.kill(launcher.pid, signal.SIGTERM)
    for launcher in leave:
        assert launcher.wait(TIMEOUT_S) == 75, launcher.stderr
    trains_with(2, last_step(folder))
    for host in range(2, hosts):
        stay.append(come(host))
        if host < hosts - 1:
            trains_with(host + 1, last_step(folder))
    assert last_step(folder) < STEPS, "the run was over before all were there again"
    wait_until(lambda: last_step(folder) == STEPS, launchers)
    for launcher in stay:
        assert launcher.wait(TIMEOUT_S) == 0, launcher.stderr

    worlds = [line.split("w ")[0] for each in launchers for line in each.stdout.splitlines()]
    assert {world for world in worlds if world.startswith("lenet-")} == {
        f"lenet-{size}" for size in range(2, hosts + 1)
    }
    result = json.loads((folder / "result.json").read_text())
    assert result["world_size"] == hosts
    assert state_of(folder) == state_of(alone)
    assert steps_of(folder) == list(range(1, STEPS + 1))


LOCAL = (
    *("--train.steps", "96", "--checkpoint.every", "4", "--synchrony.mode", "local"),
    *("--synchrony.replicas", "3", "--synchrony.local_steps", "4"),
)


def test_the_replicas_of_a_lost_host_go_to_the_others(can_emulate: None, tmp_path: Path) -> None:
    """Two hosts go on with three replicas, in a process of its own: see `tests.typed`."""
    script = "import sys, pathlib; from tests.cluster.test_membership import lose_a_host"
    done = python("-c", f"{script}; lose_a_host(pathlib.Path(sys.argv[1]))", tmp_path)
    assert done.returncode == 0, done.stderr


def lose_a_host(tmp_path: Path) -> None:
    recipe, folder, alone = (tmp_path / name for name in ("recipe.toml", "run", "alone"))
    recipe.write_text(RECIPE)
    subprocess.run(
        command(recipe, alone, 1, *LOCAL), check=True, capture_output=True, timeout=TIMEOUT_S
    )
    with VirtualCluster(3, 1_000_000_000) as net:
        meeting = ["--nnodes", "2:3", "--max-restarts", "1", "--rdzv-id", "replicas"]
        meeting += ["--rdzv-endpoint", f"{net.address(0)}:29400"]
        training = command(recipe, folder, 1, *LOCAL, *meeting)
        launchers = [Rank(host, net.namespaces[host], training, {}) for host in range(3)]
        net._ranks += launchers  # so that they go with the cluster
        wait_until(lambda: last_step(folder) > 8, launchers)
        assert last_step(folder) < 96, "the run was over before a host was lost"
        listed = subprocess.run(
            ["ip", "netns", "pids", net.namespaces[2]], capture_output=True, text=True, check=True
        )
        for pid in listed.stdout.split():
            os.kill(int(pid), signal.SIGKILL)
        for launcher in launchers[:2]:
            assert launcher.wait(TIMEOUT_S) == 0, launcher.stderr
    assert json.loads((folder / "result.json").read_text())["world_size"] == 2
    assert state_of(folder) == state_of(alone)
    assert steps_of(folder) == list(range(1, 97))
