"""Small sums between hosts of one core each: what it is worth that Gloo's threads interrupt nobody.

    python -m benchmarks.exchange.one_core --page benchmarks/results/one_core.md     # needs root

Each host has one rank and one core, with which it computes and sends. The control is the same
program with Gloo's threads under the kernel's usual policy, as every program with Gloo has them.
Sums are checked before they are timed, and both take turns; trainings end in the same weights.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from benchmarks.emulated.virtual_cluster import VirtualCluster, parse_rate
from benchmarks.planner.forecast_emulated import RECIPE, SETTINGS
from firecaffe.cluster.agree import gather_text
from firecaffe.cluster.world import World, join
from firecaffe.data.batches import TrainBatches
from firecaffe.runs.environment import commit, cpu_name
from firecaffe.training.plugins import Plugin
from firecaffe.transport.exchange import Exchange

HOSTS, RATE = 2, "1gbit"
ALGORITHMS = ("tree", "ring", "halving_doubling")
SIZES = (4_096, 65_536, 1_048_576)
TRAININGS = ("tree", "ring", "halving_doubling", "shards", "split")
STEPS, WARM_UP = 40, 8
USUAL = "ONE_CORE_USUAL"
"""Variable of a training's ranks: set if Gloo's threads have the usual policy."""

PAGE = """# Hosts of one core

    {command}

{hosts} emulated hosts, one core and one rank each, links of {rate}; {cpu}, torch {torch}, commit
{commit}. Gloo's threads wait for the one that computes or sends (`SCHED_BATCH`), or interrupt it
(usual, the control). n pairs in turns; medians, and the smallest and largest ratio.

| what | n | usual, ms | ours, ms | ours / usual | ratios |
|---|---|---|---|---|---|
{rows}

Trainings are of LeNet, 64 samples in micro-batches of 8; a step in ms. `split`: its two large
layers are split over both hosts, which exchange activations within each micro-batch.
"""


def set_policy(policy: int) -> None:
    """Give all threads of Gloo in this process a policy of the kernel's scheduler."""
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text() == "gloo_tcp_loop\n":
            os.sched_setscheduler(int(task.name), policy, os.sched_param(0))


class Usual(Plugin):
    def around_batches(self, batches: TrainBatches, world: World) -> TrainBatches:
        if USUAL in os.environ:
            set_policy(os.SCHED_OTHER)
        return batches


def plugin() -> Usual:
    return Usual()


def rank_program(pairs: int, out: Path) -> None:
    """Time each sum in blocks of 20, usual and ours in turns; rank 0 writes the slowest rank's."""
    torch.set_num_threads(1)
    rows: list[tuple[str, list[float], list[float]]] = []
    with join("cpu") as world:
        for algorithm in ALGORITHMS:
            exchange = Exchange.of_vectors(world, algorithm)
            for size in SIZES:
                vector = torch.full((size // 4,), 1.0)
                exchange.all_reduce(vector)
                assert bool((vector == world.world_size).all())
                times: dict[int, list[float]] = {os.SCHED_OTHER: [], os.SCHED_BATCH: []}
                for number in range(pairs):
                    for policy in sorted(times, reverse=number % 2 == 1):
                        set_policy(policy)
                        times[policy].append(_block(world, exchange, vector))
                usual_s, ours_s = times.values()
                rows.append((f"{algorithm}, {size:,} bytes", usual_s, ours_s))
        if world.is_first:
            out.write_text(json.dumps(rows))


def _block(world: World, exchange: Exchange, vector: torch.Tensor) -> float:
    gather_text(world, "")
    start = time.perf_counter()
    for _ in range(20):
        exchange.all_reduce(vector)
    taken = (time.perf_counter() - start) / 20
    return max(float(text) for text in gather_text(world, repr(taken)))


def training_row(
    cluster: VirtualCluster, name: str, pairs: int, folder: Path
) -> tuple[str, list[float], list[float]]:
    """Train in pairs. Raises: SystemExit if the weights differ."""
    recipe, weights = folder / "recipe.toml", set[str]()
    words = SETTINGS[name].replace("{hosts}", str(HOSTS))
    recipe.write_text(RECIPE.format(model="lenet", steps=STEPS) + words + "\n")
    times: dict[str, list[float]] = {"usual": [], "ours": []}
    for number in range(pairs):
        for which in sorted(times, reverse=number % 2 == 0):
            run = folder / f"{name}-{which}-{number}"
            environment = {"FIRECAFFE_PLUGINS": __spec__.name}
            environment |= {USUAL: "1"} if which == "usual" else {}
            command = [sys.executable, "-m", "firecaffe", "train", str(recipe)]
            command += ["--run.folder", str(run)]
            cluster.run(command, timeout_s=300.0, environment=environment)
            lines = (run / "timings/rank-0.jsonl").read_text().splitlines()[WARM_UP:]
            times[which].append(median(json.loads(line)["step_s"] for line in lines))
            weights.add(json.loads((run / "result.json").read_text())["weights_sha256"])
    if len(weights) > 1:
        raise SystemExit(f"{name}: the trainings end in other weights")
    return f"a step, {name}", times["usual"], times["ours"]


def row(what: str, usual_s: Sequence[float], ours_s: Sequence[float]) -> str:
    ratios = [ours / usual for usual, ours in zip(usual_s, ours_s, strict=True)]
    cells = [what, str(len(ratios)), *(f"{1e3 * median(s):.2f}" for s in (usual_s, ours_s))]
    cells += [f"{median(ratios):.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=9, help="of blocks of sums")
    parser.add_argument("--training-pairs", type=int, default=4)
    parser.add_argument("--page", type=Path, help="where the result page goes")
    parser.add_argument("--as-rank", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.as_rank:
        rank_program(given.pairs, given.as_rank)
        return
    with (
        TemporaryDirectory() as name,
        VirtualCluster(HOSTS, parse_rate(RATE), processors=1) as cluster,
    ):
        out, module = Path(name, "sums.json"), [sys.executable, "-m", __spec__.name]
        words = ["--pairs", str(given.pairs), "--as-rank", str(out)]
        cluster.run([*module, *words], timeout_s=600.0)
        rows = [row(*cells) for cells in json.loads(out.read_text())]
        for setting in TRAININGS:
            rows.append(row(*training_row(cluster, setting, given.training_pairs, Path(name))))
            print(rows[-1], file=sys.stderr, flush=True)
    page = PAGE.format(
        command=" ".join(["python", "-m", __spec__.name, *sys.argv[1:]]),
        hosts=HOSTS,
        rate=RATE,
        cpu=cpu_name(),
        torch=torch.__version__,
        commit=commit(),
        rows="\n".join(rows),
    )
    print(page)
    if given.page is not None:
        given.page.write_text(page)


if __name__ == "__main__":
    main()
