"""AlexNet on one host: by data, and by one weird trick; images/s, and memory against the formula.

    python -m benchmarks.parallel.split_one_host --out SPLIT.jsonl
    python -m benchmarks.parallel.split_one_host --out SPLIT.jsonl --page

Full width, made-up images of 227 x 227, momentum. The ways take turns, forth and back, each time in
fresh processes; the ratio is of the two of one turn. First one weird trick on so many ranks has to
end in the bits that it has on one.
"""

import argparse
import os
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.kit import raw_lines
from benchmarks.kit.made_up_images import EVALUATED
from firecaffe import DataConfig, ModelConfig, ParallelConfig, Recipe, SolverConfig, TrainConfig
from firecaffe.api.twins import Twin, train_twin
from firecaffe.planner.chain import chain_of
from firecaffe.planner.cluster import load_cluster
from firecaffe.planner.recipe_workload import workload_of_model
from firecaffe.planner.split_plans import data_layouts, dense_layouts
from firecaffe.planner.split_step import SplitCost
from firecaffe.planner.worker_part import memory_of
from firecaffe.recipe.checked_recipe import check_recipe
from firecaffe.runs.run_folder import read_run_file

DATA, TRICK = "data", "one weird trick"
PARTS = 4
SPLIT = {"classifier.*": "neurons", "classifier.3": "inputs"}
STEPS, CHECKED_STEPS = 7, 2
"""Of the trainings that are timed, without their first; of those whose bits are compared."""


def recipe(way: str, ranks: int, batch: int, micro_batch: int, steps: int) -> Recipe:
    words = ParallelConfig(1, ranks, SPLIT, PARTS, "one_weird_trick")
    return Recipe(
        model=ModelConfig("alexnet"),
        data=DataConfig(
            "benchmarks.kit.made_up_images:images", args={"count": batch}, augment="none"
        ),
        train=TrainConfig(batch, micro_batch, steps=steps, device="cpu", eval_batch_size=EVALUATED),
        solver=SolverConfig(base_lr=0.001, momentum=0.9),
        parallel=words if way == TRICK else ParallelConfig(),
    )


def train(way: str, ranks: int, batch: int, micro_batch: int, steps: int) -> dict[str, Any]:
    """The result of a training."""
    made = recipe(way, ranks, batch, micro_batch, steps)
    with TemporaryDirectory(prefix="firecaffe-split-") as parent:
        run = train_twin(Twin(str(ranks), ranks, check_recipe(made)), Path(parent))
        return read_run_file(run, "result.json")


def predicted_bytes(ranks: int, batch: int, micro_batch: int) -> dict[str, float]:
    """A rank's memory in both ways, as `firecaffe plan --ways` has it."""
    config = ModelConfig("alexnet")
    work = workload_of_model(config, None, batch, micro_batch)
    cluster = load_cluster("ethernet-10g")  # links take no memory
    cost = SplitCost(work, cluster, chain_of(config, work), ranks, "tree")
    by_neurons_first = (each for n, each in dense_layouts(cost, is_trick=True) if n == ranks)
    ways = {DATA: data_layouts(cost), TRICK: next(by_neurons_first)}
    return {
        way: sum(memory_of(work, cost.chain, layouts, in_memory=ranks).values())
        for way, layouts in ways.items()
    }


def check(ranks: int, batch: int, micro_batch: int) -> None:
    """Raises: SystemExit if these ranks do not end in the bits of one."""
    one, these = (
        train(TRICK, count, batch, micro_batch, CHECKED_STEPS)["state_sha256"]
        for count in (1, ranks)
    )
    if one != these:
        raise SystemExit(f"{ranks} ranks end in other bits than one")


def page(out: Path) -> str:
    """A row for each number of ranks, batch and way."""
    rows = raw_lines.read(out, "run")
    lines = [
        "| ranks | samples a step | way | n | images/s, median | least to most | to data | "
        "memory of a rank, most, MB | less than by data | by the formula |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for ranks, batch in dict.fromkeys((row["ranks"], row["batch"]) for row in rows):
        here = [row for row in rows if (row["ranks"], row["batch"]) == (ranks, batch)]
        by_way = {way: [row for row in here if row["way"] == way] for way in (DATA, TRICK)}
        ratios = [
            trick["images_per_s"] / data["images_per_s"]
            for data, trick in zip(by_way[DATA], by_way[TRICK], strict=False)
        ]
        peaks = {way: median(row["peak_bytes"] / 1e6 for row in by_way[way]) for way in by_way}
        told = {way: median(row["predicted_bytes"] / 1e6 for row in by_way[way]) for way in by_way}
        for way, found in by_way.items():
            rates = [row["images_per_s"] for row in found]
            less = f"{peaks[DATA] - peaks[way]:,.0f}" if way == TRICK else ""
            less_told = f"{told[DATA] - told[way]:,.0f}" if way == TRICK else ""
            ratio = "1"
            if way == TRICK:
                ratio = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            lines.append(
                f"| {ranks} | {batch} | {way} | {len(found)} | {median(rates):.2f} | "
                f"{min(rates):.2f} to {max(rates):.2f} | {ratio} | {peaks[way]:,.0f} | {less} | "
                f"{less_told} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="raw JSON lines")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--page", action="store_true", help="print the table of what OUT has")
    given = parser.parse_args()
    if given.page:
        print(page(given.out))
        return
    raw_lines.begin(given.out)
    os.environ["OMP_NUM_THREADS"] = "1"
    for ranks in given.ranks:
        check(ranks, given.batches[0], given.micro_batch)
        for batch in given.batches:
            predicted = predicted_bytes(ranks, batch, given.micro_batch)
            for number in range(given.rounds):
                for way in (DATA, TRICK) if number % 2 else (TRICK, DATA):
                    found = train(way, ranks, batch, given.micro_batch, STEPS)
                    row = {"kind": "run", "ranks": ranks, "batch": batch, "way": way}
                    measured = {
                        "images_per_s": found["images_per_s"],
                        "peak_bytes": max(found["peak_memory_bytes_by_rank"]),
                        "predicted_bytes": predicted[way],
                    }
                    raw_lines.append(given.out, {**row, "round": number, **measured})


if __name__ == "__main__":
    main()
