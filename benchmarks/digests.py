"""The bits of a fixed set of trainings: recorded once, compared after every change of structure.

    python -m benchmarks.digests                      # trains them and compares; some minutes
    python -m benchmarks.digests --only codec         # those with this in their name
    python -m benchmarks.digests --record             # writes digests.json anew
    python -m benchmarks.digests --tree OTHER_TREE    # trains with another tree's code

Networks, exchanges, codecs, numbers of workers, solvers, resumes and restarts, a few steps each. A
digest is of the whole state: weights, optimizer and the losses of all steps. Other kinds of
processor compute other bits, so the record names its own and is compared on no other. A processor
with AVX-512 can be told to compute as one with AVX2:

    export ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.faults.on_purpose import environment

ROOT = Path(__file__).parents[1]
RECORD = Path(__file__).with_suffix(".json")

BASE = {
    "data.name": "generated",
    "train.global_batch_size": 32,
    "train.micro_batch_size": 4,
    "train.steps": 6,
    "train.device": "cpu",
    "solver.base_lr": 0.02,
    "run.tensorboard": "false",
}
DIGITS = 12
"""Hexadecimal, of a digest."""

COMMAND = (sys.executable, "-m", "firecaffe", "train")
CODECS = ("float16", "bfloat16", "int8", "one_bit", "top_k", "threshold", "power_sgd")


@dataclass(frozen=True)
class Run:
    """One training: words beside BASE, and on how many workers."""

    words: Mapping[str, Any] = field(default_factory=dict)
    workers: int = 2
    then_workers: int = 0
    """If it stops half-way and is resumed: the workers that go on."""
    then_words: Mapping[str, Any] = field(default_factory=dict)
    """Words that are other ones when it goes on."""
    fault: str = ""
    """What happens to it on purpose; it is restarted then."""


def exchange(algorithm: str, workers: int, **more: Any) -> Run:
    return Run({"exchange.algorithm": algorithm, **more}, workers)


CODED = {"exchange.algorithm": "tree", "exchange.compressor_level": 1}
NO_MEMORY = {"exchange.shared_memory": "false"}
SPLIT = {"parallel.split": '{ "ip*" = "neurons" }', "parallel.parts": 4}
ALL_SPLIT = {
    "parallel.split": '{ conv1 = "filters", conv2 = "channels", ip1 = "neurons", ip2 = "inputs" }',
    "parallel.parts": 4,
}
TRICK = {**SPLIT, "parallel.scheme": "one_weird_trick"}
STAGES = {"parallel.stages": '["conv2"]'}
THREE_STAGES = {"parallel.stages": '["conv2", "ip1"]'}
SHARDS = {"exchange.update_at": "shards"}
LOCAL = {"synchrony.mode": "local", "synchrony.local_steps": 3, "synchrony.replicas": 4}
SIMULATED = {
    "synchrony.clock": "simulated",
    "synchrony.speeds": "gamma",
    "train.steps": 8,
    "solver.base_lr": 0.002,
}
TWO = {"parallel.model": 2}
CLIPPED = {"solver.clip_gradients": 0.5}
AVERAGE = {"train.ema_decay": 0.9}
INT8 = {**CODED, "exchange.compressor": "int8"}
FLOAT16 = {"train.autocast": "float16"}
NORMS = {"model.name": "resnet18", "train.steps": 1, "train.batch_norm_samples": 8}


def served(mode: str, **more: Any) -> Run:
    return Run({**SIMULATED, "synchrony.mode": mode, **more}, 1)


RUNS: dict[str, Run] = {
    **{
        f"exchange {name} {workers}": exchange(name, workers)
        for name in ("tree", "ring", "halving_doubling", "native")
        for workers in (1, 2, 3, 4)
    },
    **{
        f"exchange {name} {workers} by messages": exchange(name, workers, **NO_MEMORY)
        for name, workers in (
            ("tree", 2),
            ("tree", 3),
            ("ring", 3),
            ("ring", 4),
            ("halving_doubling", 4),
            ("recursive_doubling", 4),
            ("parameter_server", 4),
            ("sharded_parameter_server", 4),
            ("pipelined_tree", 4),
            ("double_tree", 4),
            ("hierarchical(tree,ring)", 4),
        )
    },
    "small buckets": exchange("tree", 2, **{"exchange.bucket_bytes": 5_000}),
    **{f"codec {name} 2": Run({**CODED, "exchange.compressor": name}, 2) for name in CODECS},
    **{
        f"codec {name} {workers}": Run({**CODED, "exchange.compressor": name}, workers)
        for name in ("int8", "power_sgd")
        for workers in (1, 3)
    },
    "network nin_small": Run({"model.name": "nin_small", "train.steps": 3}),
    "network googlenet_small_bn": Run({"model.name": "googlenet_small_bn", "train.steps": 2}),
    "network resnet18": Run({"model.name": "resnet18", "train.steps": 1}, 3),
    "solver adam": Run({"solver.type": "adam"}),
    "solver lars clipped": Run({"solver.type": "lars", "solver.clip_gradients": 0.5}, 3),
    "solver nesterov by Caffe": Run(
        {"solver.type": "nesterov", "solver.momentum_form": "caffe", "solver.weight_decay": 5e-4}
    ),
    "autocast bfloat16": Run({"train.autocast": "bfloat16"}, 3),
    "channels last": Run({"train.channels_last": "true"}),
    "augmented": Run({"data.augment": "caffe", "data.crop": 28, "data.pad": 2}, 3),
    "odd micro-batches": Run({"train.global_batch_size": 28}, 3),
    "resumed 2 then 3": Run(then_workers=3),
    "resumed 3 then 1, power_sgd": Run({**CODED, "exchange.compressor": "power_sgd"}, 3, 1),
    "resumed 1 then 2, googlenet_small_bn": Run(
        {"model.name": "googlenet_small_bn", "train.steps": 2}, 1, 2
    ),
    "float16": Run(FLOAT16),
    "average": Run(AVERAGE, 3),
    "BatchNorm estimated": Run({**NORMS, **AVERAGE}),
    "pruned": Run({"prune.keep": '{ "ip1" = 0.3 }'}),
    "shared": Run({"share.bits": '{ "ip1" = 4 }'}),
    "measured shares": Run({"synchrony.shares": "measured", "synchrony.shares_every": 2}, 3),
    "split 1": Run(SPLIT, 1),
    "split 2": Run({**SPLIT, **TWO}),
    "split 2 x 2": Run({**SPLIT, **TWO}, 4),
    "split all, adam": Run({**ALL_SPLIT, **TWO, "solver.type": "adam"}),
    "split clipped, lars": Run({**SPLIT, **TWO, **CLIPPED, "solver.type": "lars"}),
    "split float16": Run({**SPLIT, **TWO, **FLOAT16}),
    "split int8, average, 2 x 2": Run({**SPLIT, **TWO, **INT8, **AVERAGE}, 4),
    "trick 1": Run(TRICK, 1),
    "trick 2": Run({**TRICK, **TWO}),
    "trick 2 x 2, int8, clipped": Run({**TRICK, **TWO, **INT8, **CLIPPED}, 4),
    "trick float16": Run({**TRICK, **TWO, **FLOAT16}),
    "stages 2": Run(STAGES),
    "stages 3, gpipe": Run({**THREE_STAGES, "parallel.pipeline": "gpipe"}, 3),
    "stages 2 x 2, adam, clipped": Run({**STAGES, **CLIPPED, "solver.type": "adam"}, 4),
    "stages float16, average": Run({**STAGES, **FLOAT16, **AVERAGE}),
    "stages 2 x 2, int8, lamb": Run({**STAGES, **INT8, "solver.type": "lamb"}, 4),
    "shards 2": Run(SHARDS),
    "shards 3, adam, clipped, average": Run(
        {**SHARDS, **CLIPPED, **AVERAGE, "solver.type": "adam"}, 3
    ),
    "shards lamb": Run({**SHARDS, "solver.type": "lamb"}, 3),
    "backup": served("backup"),
    "stale, inverse, clipped": served(
        "stale", **CLIPPED, **{"synchrony.staleness_rate": "inverse"}
    ),
    "asynchronous, delay, int8": served(
        "asynchronous",
        **{"synchrony.compensate": "delay", "exchange.compressor": "int8"},
    ),
    "asynchronous, clipped, average": served("asynchronous", **CLIPPED, **AVERAGE),
    "asynchronous, delayed nesterov": served(
        "asynchronous", **{"synchrony.server_momentum": "delayed_nesterov"}
    ),
    "local 1": Run(LOCAL, 1),
    "local 2, clipped": Run({**LOCAL, **CLIPPED}),
    "local slowmo, adam": Run(
        {
            **LOCAL,
            "synchrony.outer": "slowmo",
            "synchrony.inner_momentum": "zero",
            "solver.type": "adam",
        }
    ),
    "local nesterov, overlap, int8": Run(
        {**LOCAL, **INT8, "synchrony.outer": "nesterov", "synchrony.overlap_steps": 1}
    ),
    "local fragments, synchronous first": Run(
        {
            **LOCAL,
            "synchrony.fragments": 3,
            "synchrony.warm_steps": 2,
            "synchrony.inner_momentum": "average",
        }
    ),
    "local split": Run({**LOCAL, **SPLIT, **TWO}),
    "local stages 2 x 2": Run({**LOCAL, **STAGES, **CLIPPED}, 4),
    "resumed stages 2 then 3 by messages": Run(
        STAGES, 2, 3, {"parallel.stages": "[]", **NO_MEMORY}
    ),
    "resumed split 2 then 1, average": Run(
        {**SPLIT, **TWO, **AVERAGE}, 2, 1, {"parallel.model": 1}
    ),
    "resumed split 2 then trick 2, int8": Run(
        {**SPLIT, **TWO, **INT8}, 2, 2, {"parallel.scheme": "one_weird_trick"}
    ),
    "resumed shards 3 then all 2, average": Run(
        {**SHARDS, **AVERAGE}, 3, 2, {"exchange.update_at": "all"}
    ),
    "resumed local 2 then 1": Run({**LOCAL, "synchrony.outer": "slowmo"}, 2, 1),
    "killed and restarted": Run({"checkpoint.every": 2}, 2, fault="kill:rank=1,step=4"),
    "frozen and restarted": Run(
        {"checkpoint.every": 2, "exchange.silent_s": 3}, 2, fault="freeze:rank=0,step=4"
    ),
}


def train(run: Run, tree: Path, folder: Path) -> str:
    """Its digest. Raises: RuntimeError with what the command said where it failed."""
    steps = int(run.words.get("train.steps", BASE["train.steps"]))
    first = folder / "run"
    if not run.then_workers:
        _command(run, run.workers, steps, tree, first)
        return _digest(first)
    _command(run, run.workers, steps // 2, tree, first)
    then = replace(run, words={**run.words, **run.then_words})
    _command(then, run.then_workers, steps, tree, folder / "resumed", ["--resume", str(first)])
    return _digest(folder / "resumed")


def _command(
    run: Run, workers: int, steps: int, tree: Path, folder: Path, more: list[str] | None = None
) -> None:
    recipe = folder.with_suffix(".toml")
    recipe.write_text('[model]\nname = "lenet"\n', encoding="utf-8")
    words = {**BASE, **run.words, "train.steps": steps, "run.folder": str(folder)}
    options = [part for name, value in words.items() for part in (f"--{name}", str(value))]
    restarts = ["--max-restarts", "1"] if run.fault else []
    faults = environment(run.fault) if run.fault else {}
    done = subprocess.run(
        [
            *COMMAND,
            str(recipe),
            *options,
            *restarts,
            "--nproc-per-node",
            str(workers),
            *(more or []),
        ],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree), **faults},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"exit {done.returncode}: {done.stderr.strip()[-400:]}")


def _digest(folder: Path) -> str:
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return str(result["state_sha256"])[:DIGITS]


def machine() -> str:
    """What decides bits beside the code."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    ]
    kind = names[0] if names else platform.machine()
    return f"{kind}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"


def main() -> int:
    parser = argparse.ArgumentParser(description="The bits of a fixed set of trainings.")
    parser.add_argument("--only", default="", metavar="PART", help="of a run's name")
    parser.add_argument("--record", action="store_true", help="write digests.json anew")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the code that trains")
    options = parser.parse_args()
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))
    if not options.record and recorded["machine"] != machine():
        print(f"recorded on {recorded['machine']}; this is {machine()}: nothing to compare with")
        return 2
    found, wrong = {}, 0
    for name, run in RUNS.items():
        if options.only not in name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                found[name] = train(run, options.tree.resolve(), Path(folder))
            except RuntimeError as error:
                found[name] = f"failed: {error}"
        before = recorded["runs"].get(name)
        is_same = options.record or found[name] == before
        wrong += not is_same
        print(f"{'same' if is_same else 'OTHER'}  {name}  {found[name][:DIGITS]}", flush=True)
        if found[name].startswith("failed"):
            print(found[name])
    if options.record:
        kept = recorded["runs"] if recorded["machine"] == machine() else {}
        record = {"machine": machine(), "runs": {**kept, **found}}
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"{len(found) - wrong} of {len(found)} the same")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
