"""What a checkpoint every 20 steps costs in throughput: runs with and without, in turns.

    python -m benchmarks.training.checkpoint_cost --page benchmarks/results/checkpoint_cost.md

Two workers train the demo's recipe. All runs must end in the same state, whose digest does not
know of checkpoints.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from firecaffe.runs.environment import commit, cpu_name

RECIPE = "recipes/nin_small.toml"
WORKERS, STEPS, EVERY = 2, 300, 20

PAGE = """# What checkpoints cost

    {command}

`{recipe}` on {workers} workers, {steps} steps of {batch} images, without checkpoints and with one
every {every} steps, in turns, each in processes of its own; who goes first changes. A checkpoint is
{bytes:.1f} MB. {cpu}, {cores} cores, torch {torch}, commit {commit}, {date}. All runs ended in
state {state}.

| | median | min | max | n |
| --- | --- | --- | --- | --- |
| images/s without | {without} | {n} |
| images/s with | {with_} | {n} |
| with / without, in the same round | {ratio} | {n} |
| excess of the three steps after one, share of the time of all | {excess} | {n} |
| ms that a step waited for one: the copy | {copy} | {n} |
| ms that a step waited for one: the one before | {wait} | {n} |
| ms that the thread wrote at one | {write} | {n} |
"""


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--page", type=Path, help="where the result page goes")
    given = parser.parse_args()
    rounds = []
    with tempfile.TemporaryDirectory(prefix="firecaffe-cost-") as parent:
        for number in range(given.rounds):
            order = (0, EVERY) if number % 2 == 0 else (EVERY, 0)
            found = {every: train(Path(parent) / f"{number}-{every}", every) for every in order}
            rounds.append(found)
            ratio = found[EVERY]["images_per_s"] / found[0]["images_per_s"]
            print(f"{number}: with / without {ratio:.4f}", flush=True)
        state = Path(parent) / f"0-{EVERY}" / "checkpoints" / f"step-{STEPS:08d}"
        size = sum(path.stat().st_size for path in state.iterdir())
    states = {result["state_sha256"] for found in rounds for result in found.values()}
    if len(states) != 1:
        print(f"error: runs ended in {len(states)} states", file=sys.stderr)
        return 1
    if given.page is not None:
        given.page.write_text(page(rounds, size, states.pop()))
    return 0


def train(folder: Path, every: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "firecaffe", "train", RECIPE, "--run.folder", str(folder)]
    command += ["--nproc-per-node", str(WORKERS), "--train.steps", str(STEPS)]
    command += ["--checkpoint.every", str(every), "--run.tensorboard", "false"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    result["excess"] = excess(folder) if every else 0.0
    return result


def excess(folder: Path) -> float:
    """Within one run: by how much the steps beside which one is written are longer than those
    before the next one, as a share of the time of all steps; the median over checkpoints.
    """
    lines = (folder / "timings/rank-0.jsonl").read_text().splitlines()
    step_s = {row["step"]: row["step_s"] for row in map(json.loads, lines)}
    shares = []
    for saved in range(EVERY, STEPS - EVERY + 1, EVERY):
        usual_s = statistics.median(step_s[saved + i] for i in range(4, EVERY + 1))
        beside_s = sum(step_s[saved + i] - usual_s for i in (1, 2, 3))
        shares.append(beside_s / (EVERY * usual_s))
    return float(statistics.median(shares))


def page(rounds: list[dict[int, dict[str, Any]]], size: int, state: str) -> str:
    costs = [found[EVERY]["checkpoints"] for found in rounds]
    in_steps = STEPS // EVERY - 1  # the last one is after the last step

    def each(word: str, count: int) -> str:
        return _spread([1e3 * cost[word] / count for cost in costs], ".1f")

    return PAGE.format(
        command=" ".join(["python", "-m", "benchmarks.training.checkpoint_cost", *sys.argv[1:]]),
        recipe=RECIPE,
        workers=WORKERS,
        steps=STEPS,
        batch=rounds[0][0]["timed_samples"] // (STEPS - 1),
        every=EVERY,
        bytes=size / 1e6,
        cpu=cpu_name(),
        cores=os.cpu_count(),
        torch=torch.__version__,
        commit=commit(),
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        state=state[:12],
        n=len(rounds),
        without=_spread([found[0]["images_per_s"] for found in rounds], ".1f"),
        with_=_spread([found[EVERY]["images_per_s"] for found in rounds], ".1f"),
        ratio=_spread(
            [found[EVERY]["images_per_s"] / found[0]["images_per_s"] for found in rounds], ".4f"
        ),
        excess=_spread([found[EVERY]["excess"] for found in rounds], ".4f"),
        copy=each("copy_s", in_steps + 1),
        wait=each("wait_s", in_steps + 1),
        write=each("write_s", in_steps + 1),
    )


def _spread(values: list[float], form: str) -> str:
    return " | ".join(f"{v:{form}}" for v in (statistics.median(values), min(values), max(values)))


if __name__ == "__main__":
    sys.exit(main())
