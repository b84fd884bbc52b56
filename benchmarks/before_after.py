"""What a change has cost: trainings and exchanges of two commits, in pairs on one machine.

    python -m benchmarks.before_after a1b4d1e > benchmarks/results/before_after.md

Each commit is checked out beside the other, and takes turns with it, who goes first changing; both
use this environment. A ratio is the time of the later commit over that of the earlier one in the
same pair. The trainings of both must end in the same weights, or their times are not compared.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch

from firecaffe.runs.environment import cpu_name

ROOT = Path(__file__).parents[1]
STEPS = 60
PAIRS = 9

HEAD = """# Before and after a change

    python -m benchmarks.before_after {before} --after {after} --pairs {pairs}

{cpu}, {cores} cores, torch {torch}. Commits {before} and {after} take turns, {pairs} pairs. A ratio
is the time after over the time before, in one pair.

| what | before | after | median ratio | ratios |
|---|---|---|---|---|"""


def train(tree: Path, workers: int) -> tuple[float, str]:
    """Return the seconds of 1,000 samples of nin_small, and the digest of the weights."""
    with tempfile.TemporaryDirectory() as name:
        words = [f"--train.steps={STEPS}", f"--run.folder={name}/run", "--run.tensorboard=false"]
        command = ["firecaffe", "train", str(tree / "recipes/nin_small.toml"), *words]
        _run(tree, [*command, f"--nproc-per-node={workers}"])
        result = json.loads(Path(name, "run/result.json").read_text())
    return 1000 / result["images_per_s"], result["weights_sha256"]


def add(tree: Path) -> tuple[float, str]:
    """Return the milliseconds of a sum of 27 MB in the shared memory of two ranks."""
    words = ["--ranks", "2", "--sizes", "27000000", "--repetitions", "5"]
    return float(_cell(_run(tree, [_program(tree, "one_host"), *words]), "shared memory", 3)), ""


def step(tree: Path) -> tuple[float, str]:
    """Return the milliseconds of a script's step with `parallelize`, LeNet on two ranks."""
    words = ["--ranks", "2", "--networks", "lenet", "--pairs", "4"]
    return float(_cell(_run(tree, [_program(tree, "ddp_script_step"), *words]), "lenet", 4)), ""


TIMED: dict[str, Callable[[Path], tuple[float, str]]] = {
    "nin_small, 1 worker, s of 1,000 samples": lambda tree: train(tree, 1),
    "nin_small, 2 workers, s of 1,000 samples": lambda tree: train(tree, 2),
    "one_host, 27 MB on 2 ranks, ms": add,
    "ddp_script_step, LeNet on 2 ranks, ms": step,
}


def _program(tree: Path, name: str) -> str:
    """Return a benchmark's module, which lies in another folder at another commit."""
    (file,) = tree.glob(f"benchmarks/**/{name}.py")
    return ".".join(file.relative_to(tree).with_suffix("").parts)


def _run(tree: Path, command: list[str]) -> str:
    # -P: not the package of the folder that this command is typed in.
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    started = [sys.executable, "-P", "-m", *command]
    done = subprocess.run(
        started, cwd=tree, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(
            f"{' '.join(started)} in {tree} ended with {done.returncode}:\n{done.stderr}"
        )
    return done.stdout


def _cell(table: str, label: str, column: int) -> str:
    """Return a cell of the first row that has a cell `label`."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return next(row[column] for row in rows if label in row)


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name) / "tree"
        subprocess.run(["git", "clone", "-q", "--shared", str(ROOT), str(tree)], check=True)
        subprocess.run(["git", "-C", str(tree), "checkout", "-q", commit], check=True)
        yield tree


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("before")
    parser.add_argument("--after", default="HEAD")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    given = parser.parse_args()
    commits = [
        subprocess.check_output(["git", "rev-parse", "--short", name], cwd=ROOT, text=True).strip()
        for name in (given.before, given.after)
    ]
    print(
        HEAD.format(
            before=commits[0],
            after=commits[1],
            pairs=given.pairs,
            cpu=cpu_name(),
            cores=os.cpu_count(),
            torch=torch.__version__,
        ),
        flush=True,
    )
    with checked_out(commits[0]) as before, checked_out(commits[1]) as after:
        for what, time in TIMED.items():
            print(row(what, time, before, after, given.pairs), flush=True)


def row(
    what: str,
    time: Callable[[Path], tuple[float, str]],
    before: Path,
    after: Path,
    pairs: int,
) -> str:
    times: dict[Path, list[float]] = {before: [], after: []}
    digests = set()
    for number in range(pairs):
        for tree in (before, after) if number % 2 == 0 else (after, before):
            taken, digest = time(tree)
            times[tree].append(taken)
            digests.add(digest)
    if len(digests) > 1:
        return f"| {what} | other weights, not compared | | | |"
    ratios = [b / a for a, b in zip(times[before], times[after], strict=True)]
    cells = [f"{median(times[tree]):.4g}" for tree in (before, after)]
    return (
        f"| {what} | {' | '.join(cells)} | {median(ratios):.3f} "
        f"| {min(ratios):.3f} to {max(ratios):.3f} |"
    )


if __name__ == "__main__":
    main()
