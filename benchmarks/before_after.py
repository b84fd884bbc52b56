"""What a change has cost: trainings and exchanges of two commits, in pairs on one machine.

    python -m benchmarks.before_after a1b4d1e > benchmarks/results/before_after.md

Each commit is checked out beside the other; both use this environment. Two trainings take turns
step by step (`kit.turns`), in as many pairs of processes as asked for, since memory lies
differently in each; who goes first changes. Their weights must be the same, or they are not
compared. Other programs take turns as whole processes. A ratio is the later commit's time over that
of the earlier one in the same pair.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch

from benchmarks.kit import turns
from benchmarks.kit.turns import pipe
from firecaffe.runs.environment import cpu_name

ROOT = Path(__file__).parents[1]
STEPS, WARM_UP = 100, 10
PAIRS = 9

HEAD = """# Before and after a change

    python -m benchmarks.before_after {before} --after {after} --pairs {pairs}

{cpu}, {cores} cores, torch {torch}. Commits {before} and {after} take turns, {pairs} pairs. A ratio
is the time after over the time before, in one pair: of trainings, which take turns step by step,
the median of {steps} steps, without their waits for data.

| what | before | after | median ratio | ratios |
|---|---|---|---|---|"""


def trainings(trees: Sequence[Path], workers: int) -> tuple[list[list[float]], set[str]]:
    """Train in both trees, in turns; return each one's seconds of a step, and their weights.

    A step is timed on rank 0 without its wait for data, which has the wait for its turn.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pipes = [[pipe(folder, side, rank) for rank in range(workers)] for side in (0, 1)]
        for path in (*pipes[0], *pipes[1]):
            os.mkfifo(path)
        held = [[os.open(path, os.O_RDWR) for path in of_side] for of_side in pipes]
        started = [_start_training(tree, folder, side, workers) for side, tree in enumerate(trees)]
        while any(process.poll() is None for process in started):
            time.sleep(0.2)
            for side, process in enumerate(started):
                if process.poll() is not None:  # the other one may go on alone
                    for descriptor in held[1 - side]:
                        os.write(descriptor, b"t")
        for descriptor in (*held[0], *held[1]):
            os.close(descriptor)
        if any(process.returncode for process in started):
            raise SystemExit(f"a training ended with {[p.returncode for p in started]}")
        runs = [folder / f"run-{side}" for side in (0, 1)]
        rows = [
            [json.loads(line) for line in (run / "timings/rank-0.jsonl").read_text().splitlines()]
            for run in runs
        ]
        results = [json.loads((run / "result.json").read_text()) for run in runs]
    steps_s = [[row["step_s"] - row["data_s"] for row in of_run[WARM_UP:]] for of_run in rows]
    return steps_s, {result["weights_sha256"] for result in results}


def _start_training(tree: Path, folder: Path, side: int, workers: int) -> subprocess.Popen[bytes]:
    words = [f"--train.steps={STEPS}", f"--run.folder={folder}/run-{side}"]
    words += ["--run.tensorboard=false", f"--nproc-per-node={workers}"]
    recipe = str(tree / "recipes/nin_small.toml")
    command = [sys.executable, "-P", "-m", "firecaffe", "train", recipe, *words]
    environment = {
        **os.environ,
        # firecaffe of its tree, and the plug-in of this one.
        "PYTHONPATH": f"{tree}{os.pathsep}{ROOT}",
        "FIRECAFFE_PLUGINS": turns.__name__,
        turns.FOLDER: str(folder),
        turns.SIDE: str(side),
    }
    return subprocess.Popen(command, cwd=tree, env=environment, stdout=subprocess.DEVNULL)


def training_row(workers: int, before: Path, after: Path, pairs: int) -> str:
    what = f"nin_small, {workers} worker{'s' if workers > 1 else ''}, ms of a step"
    ratios, weights = list[float](), set[str]()
    all_s: tuple[list[float], list[float]] = [], []
    for number in range(pairs):
        trees = [before, after] if number % 2 == 0 else [after, before]
        steps_s, digests = trainings(trees, workers)
        weights |= digests
        first_s, second_s = steps_s if number % 2 == 0 else reversed(steps_s)
        all_s[0].extend(first_s)
        all_s[1].extend(second_s)
        ratios.append(median(b / a for a, b in zip(first_s, second_s, strict=True)))
    if len(weights) > 1:
        return f"| {what} | other weights, not compared | | | |"
    return _row(what, [1e3 * median(of_tree) for of_tree in all_s], ratios)


def add(tree: Path) -> float:
    """Return the milliseconds of a sum of 27 MB in the shared memory of two ranks."""
    words = ["--ranks", "2", "--sizes", "27000000", "--repetitions", "5"]
    return float(_cell(_run(tree, [_program(tree, "one_host"), *words]), "shared memory", 3))


def step(tree: Path) -> float:
    """Return the milliseconds of a script's step with `parallelize`, LeNet on two ranks."""
    words = ["--ranks", "2", "--networks", "lenet", "--pairs", "4"]
    return float(_cell(_run(tree, [_program(tree, "ddp_script_step"), *words]), "lenet", 4))


TIMED: dict[str, Callable[[Path], float]] = {
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


def program_row(
    what: str, timed: Callable[[Path], float], before: Path, after: Path, pairs: int
) -> str:
    times: dict[Path, list[float]] = {before: [], after: []}
    for number in range(pairs):
        for tree in (before, after) if number % 2 == 0 else (after, before):
            times[tree].append(timed(tree))
    ratios = [b / a for a, b in zip(times[before], times[after], strict=True)]
    return _row(what, [median(times[before]), median(times[after])], ratios)


def _row(what: str, times: Sequence[float], ratios: Sequence[float]) -> str:
    cells = " | ".join(f"{value:.4g}" for value in times)
    spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
    return f"| {what} | {cells} | {median(ratios):.3f} | {spread} |"


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
            steps=STEPS - WARM_UP,
            cpu=cpu_name(),
            cores=os.cpu_count(),
            torch=torch.__version__,
        ),
        flush=True,
    )
    with checked_out(commits[0]) as before, checked_out(commits[1]) as after:
        for workers in (1, 2):
            print(training_row(workers, before, after, given.pairs), flush=True)
        for what, timed in TIMED.items():
            print(program_row(what, timed, before, after, given.pairs), flush=True)


if __name__ == "__main__":
    main()
