"""From a command to its end: one step of nin_small on 2 workers, against a bare DDP script.

    python -m benchmarks.training.starts               # all pairs: some minutes
    python -m benchmarks.training.starts --pairs 1     # one pair

`firecaffe train nin_small` with generated data, and `starts_ddp` under torchrun. Both
are new processes, in pairs, who is first in turn. Before they are timed, DDP's gradient is compared
with that of one process, and our training on 2 workers has to end in the weights of one worker; so
has each that is timed. Core seconds are user and system time of the command and of all processes
below it that were waited for.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from benchmarks.training.starts_ddp import batch, network
from firecaffe.files import write_atomically
from firecaffe.models import build_model
from firecaffe.runs.environment import commit, cpu_name
from firecaffe.runs.run_folder import read_run_file

RECORD = Path(__file__).parents[1] / "results" / "starts.json"
PAIRS = 9
WORKERS = 2
MOST = 1.4
"""The aim: our time over DDP's, at most."""

TIMEOUT_S = 300.0

Record = dict[str, Any]

HEAD = """# Starts

    python -m benchmarks.training.starts

One step on 2 workers from the command to its end, with all that a start and an end cost:
`firecaffe train nin_small --nproc-per-node 2 --data.name generated --train.steps 1` against a bare
DDP script under torchrun on the same network and as many images
([script](../training/starts_ddp.py)), which makes no data set, evaluates nothing and leaves no run
behind. New processes in pairs, who is first in turn; core seconds are user and system time of a
command and all processes below it that were waited for. Beforehand DDP's gradient was that of one
process; every training of ours ended in the weights of one worker. The ratio is the median over
pairs (ratios: the least and the largest).

| | n | DDP, s | DDP, range | ours, s | ours, range | ours / DDP | ratios | aim |
|---|---|---|---|---|---|---|---|---|"""


class Took(NamedTuple):
    """What a command took, in seconds."""

    wall_s: float
    core_s: float


def timed(command: Sequence[str]) -> Took:
    """Run a command to its end. Raises: SystemExit if it fails."""
    before, start_s = _core_s(), time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    took = Took(time.perf_counter() - start_s, _core_s() - before)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    return took


def _core_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def ddp(folder: Path, *options: str) -> Took:
    """Raises: SystemExit if the script's weights are not finite, changed and alike on all ranks."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORKERS}"]
    script = ["-m", "benchmarks.training.starts_ddp", *options, str(folder / "ddp.json")]
    return timed([sys.executable, *launcher, *script])


def ours(folder: Path, name: str, workers: int = WORKERS) -> tuple[Took, str]:
    """What it took, and the digest of the weights. Raises: SystemExit if it has not trained."""
    run = folder / name
    settings = ["--data.name=generated", "--train.steps=1", f"--run.folder={run}"]
    words = ["train", "nin_small", f"--nproc-per-node={workers}", *settings]
    took = timed([sys.executable, "-m", "firecaffe", *words])
    result = read_run_file(run, "result.json")
    if result["steps"] != 1:
        raise SystemExit(f"{name}: {result['steps']} steps, not 1")
    return took, str(result["weights_sha256"])


def check_network() -> None:
    """Raises: SystemExit if the script's network does not compute what nin_small does."""
    theirs, own = network().eval(), build_model("nin_small").eval()
    shapes = [[each.shape for each in model.parameters()] for model in (own, theirs)]
    if shapes[0] == shapes[1]:
        names = own.state_dict().keys()
        own.load_state_dict(dict(zip(names, theirs.state_dict().values(), strict=True)))
        images = batch()[0]
        if own(images).equal(theirs(images)):
            return
    raise SystemExit("the script's network is not nin_small")


def measure(pairs: int, folder: Path) -> Record:
    check_network()
    ddp(folder, "--check")
    weights = ours(folder, "alone", 1)[1]
    took: dict[str, list[Took]] = {"ours": [], "ddp": []}
    for number in range(pairs):
        for side in ("ours", "ddp")[:: -1 if number % 2 else 1]:
            if side == "ddp":
                took[side].append(ddp(folder))
                continue
            one, digest = ours(folder, f"run-{number}")
            if digest != weights:
                raise SystemExit(f"run {number}: other weights than those of one worker")
            took[side].append(one)
        last = [f"{side} {took[side][-1].wall_s:.2f} s" for side in took]
        print(f"{number + 1} of {pairs}: {', '.join(last)}", flush=True)
    return {
        side: {"wall_s": [each.wall_s for each in all_], "core_s": [each.core_s for each in all_]}
        for side, all_ in took.items()
    } | {
        "on": f"{cpu_name()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "commit": commit()[:12],
    }


def page(record: Record) -> str:
    lines = [HEAD]
    for name, key in (("wall-clock", "wall_s"), ("core seconds", "core_s")):
        own, theirs = record["ours"][key], record["ddp"][key]
        ratios = [mine / other for mine, other in zip(own, theirs, strict=True)]
        verdict = "reached" if median(ratios) <= MOST else "missed"
        cells = [name, str(len(ratios)), *_spread(theirs), *_spread(own)]
        cells += [f"{median(ratios):.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}"]
        lines.append(f"| {' | '.join(cells)} | at most {MOST}: {verdict} |")
    return "\n".join([*lines, "", f"{record['on']}, commit {record['commit']}.", ""])


def _spread(samples_s: Sequence[float]) -> tuple[str, str]:
    return f"{median(samples_s):.2f}", f"{min(samples_s):.2f} to {max(samples_s):.2f}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--record", type=Path, default=RECORD, help="the page lies beside it")
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        record = measure(given.pairs, Path(name))
    write_atomically(given.record, json.dumps(record, indent=1) + "\n")
    write_atomically(given.record.with_suffix(".md"), page(record))


if __name__ == "__main__":
    main()
