"""Kills random ranks at random moments, and asks whether every run ends in the undisturbed bits.

    python -m benchmarks.faults.soak --kills 100 --page benchmarks/results/soak.md   # 15 minutes

Each kill is a SIGKILL from outside, at a moment drawn over all that a rank does: its start, the
meeting, steps, checkpoints, evaluation. A run goes on by `--max-restarts` and is killed again until
it ends; then the next one begins, until all kills are done.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

from benchmarks.kit.small_run import RECIPE, command, state_of, steps_of
from firecaffe.runs.environment import commit, cpu_name

PATIENCE_S = 300.0
"""For a run that is left alone."""

PAGE = """# Soak: {kills} kills

    {command}

{kills} SIGKILLs from outside to random ranks of {workers}, at random moments (0 to {pause:g} s from
the one before, seed {seed}); runs of {steps} steps of LeNet with a checkpoint every 20, restarted
by `--max-restarts`. {cpu}, {cores} cores, torch {torch}, commit {commit}, {date}.

| | |
| --- | --- |
| runs | {runs} |
| runs that came back and ended in the undisturbed run's state | {right} |
| kills | {kills} |
| of them during start, before the attempt's first step | {early} |
| restarts, as the runs counted them | {restarts} |
| steps recorded in a run, each once and in order | {in_order} |
| seconds from a kill to the next attempt's first step, median (n = {n_back}) | {back:.1f} |

The undisturbed run had one worker and ended in state {state}.
"""


@dataclass
class Run:
    """One training under fire."""

    folder: Path
    kills: int = 0
    early: int = 0
    back_s: list[float] = field(default_factory=list)


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600, help="of each run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--pause",
        type=float,
        default=9.0,
        help="seconds between two kills, at most: a start takes about half of that",
    )
    parser.add_argument("--page", type=Path, help="where the result page goes")
    given = parser.parse_args()
    drawn = random.Random(given.seed)
    with tempfile.TemporaryDirectory(prefix="firecaffe-soak-") as parent:
        recipe = Path(parent) / "recipe.toml"
        recipe.write_text(RECIPE)
        words = ["--train.steps", str(given.steps), "--checkpoint.every", "20"]
        words += ["--exchange.silent_s", "10"]
        alone = Path(parent) / "alone"
        subprocess.run(command(recipe, alone, 1, *words), check=True, stdout=subprocess.DEVNULL)
        runs: list[Run] = []
        state, right, in_order = state_of(alone), 0, 0
        while sum(run.kills for run in runs) < given.kills:
            run = Run(Path(parent) / f"run{len(runs)}")
            runs.append(run)
            left = given.kills - sum(each.kills for each in runs)
            restarts = ("--max-restarts", str(left))
            said = fire(
                run,
                command(recipe, run.folder, given.workers, *words, *restarts),
                left,
                drawn,
                given.pause,
            )
            is_right = said == 0 and state_of(run.folder) == state
            right += is_right
            in_order += said == 0 and steps_of(run.folder) == list(range(1, given.steps + 1))
            print(
                f"run {len(runs)}: {run.kills} kills, {'right' if is_right else 'WRONG'}",
                flush=True,
            )
        if given.page is not None:
            given.page.write_text(page(given, runs, right, in_order, state))
    return 0 if right == in_order == len(runs) else 1


def fire(run: Run, training: list[str], most: int, drawn: random.Random, pause_s: float) -> int:
    """Trains and kills; returns the exit code, -1 where the run had to be given up."""
    with subprocess.Popen(
        training,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as launcher:
        while run.kills < most:
            try:
                launcher.wait(drawn.uniform(0.0, pause_s))
                break
            except subprocess.TimeoutExpired:
                pass
            victims = ranks_of(launcher.pid)
            if victims:
                victim = drawn.choice(victims)
                before = last_step_s(run.folder)
                try:
                    victim.send_signal(signal.SIGKILL)
                except psutil.NoSuchProcess:
                    continue
                run.kills += 1
                run.early += before < victim.create_time()
                wait_for_step(run, launcher, time.time())
        try:
            _, errors = launcher.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            for process in psutil.Process(launcher.pid).children(recursive=True):
                process.kill()
            launcher.kill()
            print("gave up on a run that did not end", file=sys.stderr)
            return -1
        if launcher.returncode:
            print(errors, file=sys.stderr)
        return launcher.returncode


def wait_for_step(run: Run, launcher: subprocess.Popen[str], killed_s: float) -> None:
    """Half of the kills leave the run time to take a step; the others meet it while it starts."""
    if run.kills % 2:
        return
    until = time.monotonic() + PATIENCE_S
    while launcher.poll() is None and time.monotonic() < until:
        # The files are rewritten when an attempt goes on; then they grow with its steps.
        if last_step_s(run.folder) > killed_s and len(steps_of(run.folder)) % 20:
            run.back_s.append(time.time() - killed_s)
            return
        time.sleep(0.02)


def ranks_of(launcher: int) -> list[psutil.Process]:
    """Each leads a session of its own."""
    try:
        children = psutil.Process(launcher).children()
        return [child for child in children if os.getsid(child.pid) == child.pid]
    except (psutil.Error, ProcessLookupError):
        return []


def last_step_s(folder: Path) -> float:
    """When the first rank last recorded a step."""
    try:
        return os.stat(folder / "metrics.jsonl").st_mtime
    except OSError:
        return 0.0


def restarts_of(folder: Path) -> int:
    fault = json.loads((folder / "fault.json").read_text())
    return 1 + len(fault["earlier"])


def page(given: argparse.Namespace, runs: list[Run], right: int, in_order: int, state: str) -> str:
    back = [taken for run in runs for taken in run.back_s]
    return PAGE.format(
        command=" ".join(["python", "-m", "benchmarks.faults.soak", *sys.argv[1:]]),
        kills=sum(run.kills for run in runs),
        workers=given.workers,
        pause=given.pause,
        seed=given.seed,
        steps=given.steps,
        cpu=cpu_name(),
        cores=os.cpu_count(),
        torch=torch.__version__,
        commit=commit(),
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        runs=len(runs),
        right=right,
        early=sum(run.early for run in runs),
        restarts=sum(restarts_of(run.folder) for run in runs if run.kills),
        in_order=f"{in_order} of {len(runs)} runs",
        back=statistics.median(back) if back else float("nan"),
        n_back=len(back),
        state=state[:12],
    )


if __name__ == "__main__":
    sys.exit(main())
