"""Adam on AlexNet: every rank updates all weights, or a shard; memory of a rank, and step time.

    python -m benchmarks.training.update_at --out UPDATE_AT.jsonl
    python -m benchmarks.training.update_at --out UPDATE_AT.jsonl --page

Full width, made-up images of 227 x 227, one host. The ways take turns, forth and back, each time in
fresh processes; ratios are of one turn. Ranks of one host may add in shared memory, which an update
in shards does not; `messages` updates all without it, as between hosts. First all ways have to end
in the bits of one rank.
"""

import argparse
import os
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.kit import raw_lines
from benchmarks.kit.made_up_images import EVALUATED
from firecaffe import DataConfig, ExchangeConfig, ModelConfig, Recipe, SolverConfig, TrainConfig
from firecaffe.api.twins import Twin, train_twin
from firecaffe.planner.memory import memory_bytes
from firecaffe.planner.recipe_workload import workload_of
from firecaffe.recipe.checked_recipe import check_recipe
from firecaffe.runs.run_folder import read_run_file

ALL, MESSAGES, SHARDS = "all", "all, by messages", "shards"
WAYS = {
    ALL: ExchangeConfig(),
    MESSAGES: ExchangeConfig(shared_memory=False),
    SHARDS: ExchangeConfig(update_at="shards"),
}
STEPS, CHECKED_STEPS = 7, 2
"""Of the trainings that are timed, without their first; of those whose bits are compared."""


def recipe(way: str, given: argparse.Namespace, steps: int) -> Recipe:
    batch, micro_batch = given.batch, given.micro_batch
    return Recipe(
        model=ModelConfig("alexnet"),
        data=DataConfig(
            "benchmarks.kit.made_up_images:images", args={"count": batch}, augment="none"
        ),
        train=TrainConfig(batch, micro_batch, steps=steps, device="cpu", eval_batch_size=EVALUATED),
        solver=SolverConfig(given.solver, base_lr=0.0001, clip_gradients=given.clip),
        exchange=WAYS[way],
    )


def train(way: str, ranks: int, given: argparse.Namespace, steps: int) -> dict[str, Any]:
    """The result of a training."""
    made = recipe(way, given, steps)
    with TemporaryDirectory(prefix="firecaffe-update-at-") as parent:
        run = train_twin(Twin(str(ranks), ranks, check_recipe(made)), Path(parent))
        return read_run_file(run, "result.json")


def check(ranks: int, given: argparse.Namespace) -> None:
    """Raises: SystemExit if these ranks do not end in the bits of one, in each way."""
    one = train(ALL, 1, given, CHECKED_STEPS)["state_sha256"]
    for way in WAYS:
        if train(way, ranks, given, CHECKED_STEPS)["state_sha256"] != one:
            raise SystemExit(f"{ranks} ranks, {way}: other bits than one rank's")


def page(out: Path) -> str:
    """A row for each number of ranks and way."""
    rows = raw_lines.read(out, "run")
    lines = [
        "| solver | ranks | way | n | optimizer state of a rank, most, MB | peak of a rank, most, "
        "MB | less than by messages | by the formula | step, median, s | to all, by messages |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for solver, ranks in dict.fromkeys((row["solver"], row["ranks"]) for row in rows):
        here = [row for row in rows if (row["solver"], row["ranks"]) == (solver, ranks)]
        by_way = {way: [row for row in here if row["way"] == way] for way in WAYS}
        peaks = {way: median(r["peak_bytes"] / 1e6 for r in found) for way, found in by_way.items()}
        for way, found in by_way.items():
            less = peaks[MESSAGES] - peaks[way]
            told = (by_way[MESSAGES][0]["predicted_bytes"] - found[0]["predicted_bytes"]) / 1e6
            pairs = zip(found, by_way[MESSAGES], strict=False)
            ratios = [own["step_s"] / other["step_s"] for own, other in pairs]
            lines.append(
                f"| {solver} | {ranks} | {way} | {len(found)} | "
                f"{found[0]['optimizer_bytes'] / 1e6:,.1f} | {peaks[way]:,.0f} | "
                + (f"{less:,.0f} | {told:,.0f} | " if way == SHARDS else "| | ")
                + f"{median(row['step_s'] for row in found):.2f} | "
                f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="raw JSON lines")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--solver", default="adam")
    parser.add_argument("--clip", type=float, default=0.0, help="solver.clip_gradients")
    parser.add_argument("--page", action="store_true", help="print the table of what OUT has")
    given = parser.parse_args()
    if given.page:
        print(page(given.out))
        return
    raw_lines.begin(given.out)
    os.environ["OMP_NUM_THREADS"] = "1"
    name = given.solver + f", clipped at {given.clip:g}" * bool(given.clip)
    for ranks in given.ranks:
        check(ranks, given)
        for number in range(given.rounds):
            for way in WAYS if number % 2 else reversed(WAYS):
                found = train(way, ranks, given, STEPS)
                planned = workload_of(check_recipe(recipe(way, given, STEPS)))
                row = {"kind": "run", "solver": name, "ranks": ranks, "way": way, "round": number}
                measured = {
                    "optimizer_bytes": max(found["optimizer_bytes_by_rank"]),
                    "peak_bytes": max(found["peak_memory_bytes_by_rank"]),
                    "predicted_bytes": sum(memory_bytes(planned, ranks).values()),
                    "step_s": given.batch / found["images_per_s"],
                }
                raw_lines.append(given.out, {**row, **measured})


if __name__ == "__main__":
    main()
