"""GoogLeNet in stages on slow links, against data parallelism on the same links and global batch.

    sudo -E python -m benchmarks.parallel.pipeline_speed --out PIPELINE.jsonl
    python -m benchmarks.parallel.pipeline_speed --out PIPELINE.jsonl --page

Emulated hosts, one worker each, with equal shares of this machine's processors; made-up images of
64 x 64. Layouts take turns, each time in fresh processes, and all have to end in the digest of one
worker. Each cluster is looked over by `firecaffe check` first, so that every training is forecast
before its first step. Stages begin where the slowest of them has the fewest multiplications.
"""

import argparse
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.emulated.virtual_cluster import VirtualCluster, parse_rate
from benchmarks.kit import raw_lines
from benchmarks.kit.made_up_images import RECIPE
from firecaffe.models.googlenet import GoogLeNet
from firecaffe.parallel.stages import idle_share
from firecaffe.runs.rank_times import explain, read_timings
from firecaffe.runs.run_folder import read_run_file
from firecaffe.runs.score import score, score_parallel

CLASSES, SIZE = 10, 64
BATCH, MICRO_BATCH, STEPS = 64, 4, 6
KEPT = 0.1
"""Of the processors, for the kernel's work on packets."""

GOOGLENET = {
    "model": "benchmarks.parallel.pipeline_speed:network",
    "size": SIZE,
    "classes": CLASSES,
}


def network() -> nn.Module:
    return GoogLeNet(CLASSES, 3, batch_norm=False, aux_logits=False)


def multiplications() -> dict[str, int]:
    """Of each child of the network, for one image, in the order of the calls."""
    model, found = network(), dict[str, int]()

    def count(name: str, layer: nn.Module, y: Tensor) -> None:
        weight = layer.weight
        assert isinstance(weight, Tensor)
        found[name] = found.get(name, 0) + weight.numel() * y[0, 0].numel()

    for child, module in model.named_children():
        for layer in module.modules():
            if isinstance(layer, nn.Conv2d | nn.Linear):
                layer.register_forward_hook(lambda m, _, y, name=child: count(name, m, y))
    model.eval()(torch.zeros(1, 3, SIZE, SIZE))
    return found


def stages_of(count: int) -> list[str]:
    """The modules with which the stages after the first begin."""
    work = multiplications()
    names, costs = list(work), list(work.values())

    def slowest(cuts: tuple[int, ...]) -> int:
        return max(sum(costs[a:b]) for a, b in itertools.pairwise([0, *cuts, len(costs)]))

    best = min(itertools.combinations(range(1, len(names)), count - 1), key=slowest)
    return [names[cut] for cut in best]


def layouts(hosts: int) -> Iterator[tuple[str, list[str]]]:
    """Each with the words of a recipe that say it."""
    yield "data", []
    for stages in (2, 4):
        if stages <= hosts:
            named = ",".join(f'"{name}"' for name in stages_of(stages))
            data = hosts // stages
            for order in ("1f1b", "gpipe") if stages == hosts else ("1f1b",):
                name = f"{stages} stages, {order}" if data == 1 else f"{data} x {stages} stages"
                words = [f"--parallel.stages=[{named}]", "--parallel.pipeline", order]
                yield name, words


def measure(hosts: int, rate: str, rounds: int, out: Path, folder: Path) -> None:
    """Raises: SystemExit if a layout does not end in the digest of one worker."""
    recipe, file = folder / "recipe.toml", folder / "cluster.toml"
    recipe.write_text(RECIPE.format(**GOOGLENET, batch=BATCH, micro_batch=MICRO_BATCH, steps=STEPS))
    program = [sys.executable, "-m", "firecaffe"]
    environment = {"OMP_NUM_THREADS": "1"}
    alone = next(iter(raw_lines.read(out, "alone")), None)
    processors = (1 - KEPT) * (os.cpu_count() or 1) / hosts
    if alone is None:
        with VirtualCluster(1, parse_rate(rate)) as cluster:
            words = ["train", str(recipe), "--run.folder", str(folder / "alone")]
            cluster.run([*program, *words], timeout_s=600.0, environment=environment)
        alone = {"kind": "alone", "digest": _digest(folder / "alone")}
        raw_lines.append(out, alone)
    with VirtualCluster(hosts, parse_rate(rate), processors=processors) as cluster:
        looks = ["check", str(recipe), "--write", str(file), "--folder", str(folder)]
        cluster.run([*program, *looks], timeout_s=600.0, environment=environment)
        choices = list(layouts(hosts))
        for number in range(rounds):
            for name, words in choices if number % 2 else choices[::-1]:
                run = folder / f"{number}-{name}".replace(" ", "-")
                own = ["--run.folder", str(run), "--run.cluster", str(file), *words]
                command = [*program, "train", str(recipe), *own]
                cluster.run(command, timeout_s=900.0, environment=environment)
                if _digest(run) != alone["digest"]:
                    raise SystemExit(f"{name} does not end in the digest of one worker")
                row = {"kind": "run", "hosts": hosts, "rate": rate, "layout": name}
                raw_lines.append(out, {**row, "round": number, **read(run)})


def read(run: Path) -> dict[str, Any]:
    """What a run took: a step's seconds on the slowest rank, as `firecaffe explain` has it, those
    of its forecast, if it has one, and the share of a step for which each rank was idle.
    """
    rows = read_timings(run)
    found = score_parallel(run, rows) or score(run, rows, explain(run))
    idle = [
        median(row["idle_s"] / row["step_s"] for row in of_rank[1:])
        for of_rank in rows.values()
        if "idle_s" in of_rank[-1]
    ]
    steps_s = [median(row["step_s"] for row in of_rank[1:]) for of_rank in rows.values()]
    return {
        "step_s": max(steps_s),
        "forecast_s": None if found is None else found.step.forecast_s,
        "idle": idle,
    }


def _digest(run: Path) -> str:
    digest: str = read_run_file(run, "result.json")["state_sha256"]
    return digest


def page(out: Path) -> str:
    """A row for each link and layout."""
    lines = [
        "| hosts | link | layout | n | images/s, median | least to most | to data | idle | "
        "formula | forecast / measured |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    rows = raw_lines.read(out, "run")
    for hosts, rate in dict.fromkeys((row["hosts"], row["rate"]) for row in rows):
        here = [row for row in rows if (row["hosts"], row["rate"]) == (hosts, rate)]
        base = {row["round"]: row["step_s"] for row in here if row["layout"] == "data"}
        for name in dict.fromkeys(row["layout"] for row in here):
            own = [row for row in here if row["layout"] == name]
            rates = [BATCH / row["step_s"] for row in own]
            ratios = [base[row["round"]] / row["step_s"] for row in own if row["round"] in base]
            idle, formula = "", ""
            if own[0]["idle"]:
                stages = int(name.partition(" stages")[0].rpartition(" ")[2])
                micro_batches = BATCH // MICRO_BATCH // (hosts // stages)
                idle = f"{median(fmean(row['idle']) for row in own):.3f}"
                formula = f"{float(idle_share(stages, micro_batches)):.3f}"
            told = [row["forecast_s"] / row["step_s"] for row in own if row["forecast_s"]]
            said = f"{median(told):.2f} ({min(told):.2f} to {max(told):.2f})" if told else ""
            lines.append(
                f"| {hosts} | {rate} | {name} | {len(own)} | {median(rates):.1f} | "
                f"{min(rates):.1f} to {max(rates):.1f} | {median(ratios):.2f} | {idle} | {formula} "
                f"| {said} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="raw JSON lines")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit"])
    parser.add_argument("--page", action="store_true", help="print the table of what OUT has")
    given = parser.parse_args()
    if given.page:
        print(page(given.out))
        return
    raw_lines.begin(given.out)
    for hosts, rate in itertools.product(given.hosts, given.rates):
        with TemporaryDirectory(prefix="firecaffe-pipeline-") as folder:
            measure(hosts, rate, given.rounds, given.out, Path(folder))


if __name__ == "__main__":
    main()
