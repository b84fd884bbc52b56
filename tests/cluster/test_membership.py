"""Hosts leave and come while a run goes on, 4, 2, 3, then 4 again, to the bits of one worker."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.cluster_run import Rank
from benchmarks.small_run import RECIPE, command, state_of, steps_of
from benchmarks.virtual_cluster import VirtualCluster

Up = Callable[..., VirtualCluster]

STEPS = 900
TIMEOUT_S = 150.0

WORDS = (
    *("--train.steps", str(STEPS), "--checkpoint.every", "200"),
    *("--train.global_batch_size", "16", "--train.micro_batch_size", "2"),
)


def last_step(folder: Path) -> int:
    return max(steps_of(folder), default=0)


def wait_until(is_so: Callable[[], bool], launchers: list[Rank]) -> None:
    until = time.monotonic() + TIMEOUT_S
    while not is_so():
        said = "\n".join(f"{each.stdout[-2000:]}\n{each.stderr[-2000:]}" for each in launchers)
        assert time.monotonic() < until, said
        time.sleep(0.05)


def test_four_two_three_four(cluster: Up, tmp_path: Path) -> None:
    recipe, folder = tmp_path / "recipe.toml", tmp_path / "run"
    recipe.write_text(RECIPE)
    alone = tmp_path / "alone"
    subprocess.run(
        command(recipe, alone, 1, *WORDS), check=True, capture_output=True, timeout=TIMEOUT_S
    )

    net = cluster(4, 1_000_000_000)
    meeting = ["--nnodes", "2:4", "--max-restarts", "3", "--rdzv-id", "members"]
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

    first = [come(host) for host in range(4)]
    trains_with(4, 0)
    for host in (2, 3):
        os.kill(first[host].pid, signal.SIGTERM)
    for host in (2, 3):
        assert first[host].wait(TIMEOUT_S) == 75, first[host].stderr
    trains_with(2, last_step(folder))
    third = come(2)
    trains_with(3, last_step(folder))
    fourth = come(3)
    before = last_step(folder)
    assert before < STEPS, "the run was over before all were there again"
    wait_until(lambda: last_step(folder) == STEPS, launchers)
    for launcher in (first[0], first[1], third, fourth):
        assert launcher.wait(TIMEOUT_S) == 0, launcher.stderr

    worlds = [line.split("w ")[0] for each in launchers for line in each.stdout.splitlines()]
    assert {world for world in worlds if world.startswith("lenet-")} == {
        "lenet-2",
        "lenet-3",
        "lenet-4",
    }
    result = json.loads((folder / "result.json").read_text())
    assert result["world_size"] == 4
    assert state_of(folder) == state_of(alone)
    assert steps_of(folder) == list(range(1, STEPS + 1))
