"""What a checkpoint costs where a compressor keeps much back: seconds in the step, and memory.

    python -m benchmarks.compression.compressor_checkpoint \\
        --page benchmarks/results/compressor_checkpoint.md

Each micro-batch's node keeps back as much as the weights are, so a checkpoint holds many times the
weights. Two ranks train a perceptron; then two others resume.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import firecaffe
from firecaffe import CheckpointConfig, ExchangeConfig, Recipe, RunConfig, TrainConfig
from firecaffe.data import TensorDataset
from firecaffe.runs.environment import commit, cpu_name
from firecaffe.training.checkpoint import Checkpoint
from firecaffe.training.saver import Saver
from firecaffe.training.state import State

WORKERS, NODES, WIDTH, STEPS, EVERY = 2, 8, 2048, 10, 2

PAGE = """# What a checkpoint costs where a compressor keeps much back

    {command}

A perceptron of {weights:.1f} MB of weights, {nodes} micro-batches a step (a node each), compressor
one_bit, on {workers} ranks of one host; a checkpoint every {every} of {steps} steps, {file:.0f} MB
each. Seconds are those that a step waits; memory is the growth of the process's peak (VmHWM) from
before the checkpoint until it is on the disk, without the first one, which makes the copies that
later ones use again. {cpu}, {cores} cores, torch {torch}, commit {commit}, {date}.

| | median | min | max | n |
| --- | --- | --- | --- | --- |
{rows}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page", type=Path, help="where the result page goes")
    parser.add_argument("--as-rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--resume", type=str, default=None, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.as_rank is not None:
        train_rank(given.as_rank, given.resume)
        return 0
    with tempfile.TemporaryDirectory(prefix="firecaffe-kept-") as parent:
        first, second = Path(parent) / "first", Path(parent) / "second"
        saved = run_ranks(first, [])
        resumed = run_ranks(second, ["--resume", str(first / "run")])
        newest = max((first / "run" / "checkpoints").glob("step-*"))
        file_bytes = sum(path.stat().st_size for path in newest.iterdir())
    rows = []
    for rank, found in enumerate(saved):
        later = found["saves"][1:]
        rows.append(row(f"s in the step, rank {rank}", [each["s"] for each in later], ".3f"))
        grown = [each["grown_bytes"] / 1e6 for each in later]
        rows.append(row(f"MB of memory, rank {rank}", grown, ".0f"))
    for rank, (fresh, again) in enumerate(zip(saved, resumed, strict=True)):
        more = (again["peak_bytes"] - fresh["peak_bytes"]) / 1e6
        rows.append(row(f"MB more before the first step, resumed, rank {rank}", [more], ".0f"))
    text = PAGE.format(
        command=" ".join(
            ["python", "-m", "benchmarks.compression.compressor_checkpoint", *sys.argv[1:]]
        ),
        weights=sum(p.nbytes for p in network().parameters()) / 1e6,
        nodes=NODES,
        workers=WORKERS,
        every=EVERY,
        steps=STEPS,
        file=file_bytes / 1e6,
        cpu=cpu_name(),
        cores=os.cpu_count(),
        torch=torch.__version__,
        commit=commit(),
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        rows="\n".join(rows),
    )
    print(text)
    if given.page is not None:
        given.page.write_text(text)
    return 0


def row(what: str, values: list[float], form: str) -> str:
    three = statistics.median(values), min(values), max(values)
    return f"| {what} | {' | '.join(format(value, form) for value in three)} | {len(values)} |"


def run_ranks(folder: Path, words: list[str]) -> list[dict[str, Any]]:
    """What each rank found."""
    folder.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(WORKERS)]
    command += [
        "-m",
        "benchmarks.compression.compressor_checkpoint",
        "--as-rank",
        str(folder),
        *words,
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORKERS)]


def network() -> nn.Module:
    wide = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), nn.Linear(784, WIDTH), *wide, nn.Linear(WIDTH, 10))


def train_rank(folder: Path, resume: str | None) -> None:
    found: dict[str, Any] = {"saves": []}
    begin, save = Saver.__init__, Saver.save

    def begun(saver: Saver, *words: Any) -> None:
        """When all that is resumed is there, and no step was done."""
        found["peak_bytes"] = status_bytes("VmHWM")
        begin(saver, *words)

    def measured(saver: Saver, checkpoint: Checkpoint, state: State) -> None:
        before = status_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
        start_s = time.perf_counter()
        save(saver, checkpoint, state)
        took_s = time.perf_counter() - start_s
        saver._wait(None)
        grown = status_bytes("VmHWM") - before
        found["saves"].append({"s": took_s, "grown_bytes": grown})

    patch.object(Saver, "__init__", begun).start()
    patch.object(Saver, "save", measured).start()
    images = (torch.arange(64 * 784) * 37 % 251).to(torch.uint8).view(64, 1, 28, 28)
    data = partial(TensorDataset, images, torch.arange(64) % 10, 10)
    recipe = Recipe(
        train=TrainConfig(
            global_batch_size=2 * NODES,
            micro_batch_size=2,
            steps=STEPS,
        ),
        exchange=ExchangeConfig(compressor="one_bit"),
        checkpoint=CheckpointConfig(every=EVERY),
        run=RunConfig(folder=str(folder / "run"), tensorboard=False),
    )
    firecaffe.train(recipe, network, data(), data(), resume=resume)
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))


def status_bytes(word: str) -> int:
    match = re.search(rf"{word}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return 1024 * int(match[1])


if __name__ == "__main__":
    sys.exit(main())
