"""A server in parts: what it is worth that learners and owners have a connection for each role.

    python -m benchmarks.synchrony.owner_lines --page benchmarks/results/owner_lines.md

Needs root. The control sends all between two ranks over one connection of Gloo's, on which a
receiver says that it is ready behind all payloads that were sent before. Both take turns. Before a
run's steps count, it is replayed from its log, and must come to the same bits.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from torch._C._distributed_c10d import Store

from benchmarks.emulated.virtual_cluster import VirtualCluster, parse_rate
from benchmarks.planner.forecast_emulated import KEPT, RECIPE, SETTINGS
from firecaffe import replay
from firecaffe.runs.environment import commit, cpu_name
from firecaffe.training.modes.served import owners as ranks
from firecaffe.training.plugins import Plugin
from firecaffe.transport.lane import LaneMesh, Line

SETTING = "asynchronous, sharded"
STEPS, WARM_UP = 30, 4
ONE = "OWNER_LINES_ONE"
"""Variable of a training's ranks: set if all goes over one connection."""

PAGE = """# Connections of a server in parts

    {command}

LeNet, 64 samples in micro-batches of 8, `synchrony.mode` asynchronous and `server` sharded, on
emulated hosts; {cpu}, torch {torch}, commit {commit}.
*One*: a single connection between two ranks, the control. *Each*: one for each learner and owner.
n pairs in turns; medians of a step, and the smallest and largest ratio. Each run was replayed to
the same bits.

| hosts | link | n | one, ms | each, ms | each / one | ratios |
|---|---|---|---|---|---|---|
{rows}
"""


class OneConnection(ranks.OwnerLines):
    def __init__(self, store: Store, rank: int, size: int, per_rank: int, timeout_s: float) -> None:
        self.rank, self.others = rank, [other for other in range(size) if other != rank]
        self._orders, self._meshes = LaneMesh(store, "owners", rank, size, timeout_s), {}

    def to_owner(self, owner: int, place: int) -> Line:
        return self.order_line(owner, 5 + 2 * place, 6 + 2 * place)

    def to_learner(self, rank: int, place: int) -> Line:
        return self.order_line(rank, 6 + 2 * place, 5 + 2 * place)


def plugin() -> Plugin:
    if ONE in os.environ:
        vars(ranks)["OwnerLines"] = OneConnection
    return Plugin()


def step_s(cluster: VirtualCluster, recipe: Path, run: Path, one: bool) -> float:
    """Train and replay. Raises: NotIdenticalError if the replay has other bits."""
    environment = {"FIRECAFFE_PLUGINS": __spec__.name, **({ONE: "1"} if one else {})}
    command = [sys.executable, "-m", "firecaffe", "train", str(recipe), "--run.folder", str(run)]
    cluster.run(command, timeout_s=600.0, environment=environment)
    replay(run)
    lines = (run / "timings/rank-0.jsonl").read_text().splitlines()[WARM_UP:]
    taken: list[float] = [json.loads(line)["step_s"] for line in lines]
    return median(taken)


def row(hosts: int, rate: str, pairs: int, folder: Path) -> str:
    folder.mkdir()
    recipe, times = folder / "recipe.toml", {True: list[float](), False: list[float]()}
    recipe.write_text(RECIPE.format(model="lenet", steps=STEPS) + SETTINGS[SETTING] + "\n")
    cores = os.cpu_count() or 1
    processors = cores // hosts if cores % hosts == 0 else (1 - KEPT) * cores / hosts
    with VirtualCluster(hosts, parse_rate(rate), processors=processors) as cluster:
        for number in range(pairs):
            for one in sorted(times, reverse=number % 2 == 0):
                times[one].append(step_s(cluster, recipe, folder / f"{number}-{one}", one))
    ratios = [each / one for one, each in zip(times[True], times[False], strict=True)]
    cells = [str(hosts), rate, str(pairs), *(f"{1e3 * median(times[one]):,.0f}" for one in times)]
    cells += [f"{median(ratios):.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}"]
    return f"| {' | '.join(cells)} |"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit"])
    parser.add_argument("--page", type=Path, help="where the result page goes")
    given = parser.parse_args(argv)
    with TemporaryDirectory(prefix="firecaffe-owners-") as name:
        rows = [
            row(hosts, rate, given.pairs, Path(name, f"{hosts}-{rate}"))
            for hosts in given.hosts
            for rate in given.rates
        ]
    page = PAGE.format(
        command=f"python -m {__spec__.name} --pairs {given.pairs}",
        cpu=cpu_name(),
        torch=torch.__version__,
        commit=commit(),
        rows="\n".join(rows),
    )
    if given.page is not None:
        given.page.write_text(page, encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main()
