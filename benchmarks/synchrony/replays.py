"""Trainings on real workers computed again from their logs; and what a killed worker holds up.

    python -m benchmarks.synchrony.replays --out REPLAYS.jsonl
    python -m benchmarks.synchrony.replays --out REPLAYS.jsonl --keep RUNS   # before: 21 runs
    python -m benchmarks.synchrony.replays --again RUNS                       # after it

LeNet on Fashion-MNIST, `firecaffe train` with three ranks on this host, three times for each mode.
In the third a rank kills itself when it is about to fetch a micro-batch; a server in parts ends
with it, and two ranks resume the run from its newest checkpoint. Each is followed by
`firecaffe replay`, which has to come to the same digests of weights, buffers and optimizer state.

A row of a killed rank has, from the log: seconds from the pull of the micro-batch with which it
died to the event of its loss; the longest time around it in which the server took no gradient, and
the median of that time in the rest of the run; micro-batches that were never applied.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.faults.on_purpose import environment
from benchmarks.kit import raw_lines
from benchmarks.synchrony.modes_events import logged
from firecaffe.errors import NotIdenticalError
from firecaffe.faults import KINDS
from firecaffe.runs.environment import commit, cpu_name
from firecaffe.synchrony.events import Lose, Pull, Push
from firecaffe.synchrony.server_policies import Work

RECIPE = Path(__file__).parents[2] / "recipes" / "lenet_fashion.toml"

RANKS, STEPS, LEAVES = 3, 60, 8
KILLED, AT_STEP = 2, 25
RESUMED = "resumed"

# Late gradients with the recipe's momentum of 0.9 would diverge.
GENTLE = ["--solver.momentum", "0.5", "--solver.base_lr", "0.003"]

MODES = {
    "backup": ["--synchrony.mode", "backup"],
    "backup, dropped again": ["--synchrony.mode", "backup", "--synchrony.dropped", "again"],
    "stale": ["--synchrony.mode", "stale", "--synchrony.max_staleness", "1"],
    "asynchronous": ["--synchrony.mode", "asynchronous"],
    "asynchronous, 2 gradients an update": [
        *("--synchrony.mode", "asynchronous", "--synchrony.gradients_per_update", "2"),
        *("--synchrony.compensate", "delay"),
    ],
    "asynchronous, delayed Nesterov, 2 in flight": [
        *("--synchrony.mode", "asynchronous", "--synchrony.in_flight", "2"),
        *("--synchrony.server_momentum", "delayed_nesterov", "--solver.type", "nesterov"),
        *("--solver.momentum_form", "torch"),
    ],
    "asynchronous, sharded server": [
        *("--synchrony.mode", "asynchronous", "--synchrony.server", "sharded"),
        *("--checkpoint.every", "15"),
    ],
}
"""Words of the command line."""


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, help="raw JSON lines")
    what.add_argument("--again", type=Path, help="replays the runs that were kept here")
    parser.add_argument("--keep", type=Path, help="where runs stay; must not exist")
    parser.add_argument("--runs", type=int, default=3, help="of each mode; the last has a kill")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=[*MODES])
    given = parser.parse_args()
    if given.keep and (given.again or given.keep.exists()):
        parser.error("--keep goes with --out, and names a folder that does not exist yet")
    if given.again:
        replay_kept(given.again)
        return
    if given.keep:
        given.keep.mkdir(parents=True)
    conditions = {"cpu": cpu_name(), "cores": os.cpu_count() or 1, "commit": commit()[:12]}
    raw_lines.append(given.out, {"kind": "conditions", **conditions})
    for mode in given.modes:
        for number in range(given.runs):
            with tempfile.TemporaryDirectory() as parent:
                folder = Path(parent, "run")
                row = run(mode, number == given.runs - 1, folder)
                if given.keep:
                    resumed = folder.with_name(RESUMED)
                    kept = resumed if resumed.exists() else folder
                    shutil.copytree(kept, given.keep / f"{mode}, {number}")
            raw_lines.append(given.out, {"kind": "replay", "mode": mode, "run": number, **row})
            print(mode, number, row, flush=True)


def run(mode: str, is_killed: bool, folder: Path) -> dict[str, Any]:
    """A training and its replay. Raises: SystemExit if one of them does not end."""
    command = [sys.executable, "-m", "firecaffe"]
    words = ["--train.steps", str(STEPS), "--train.device", "cpu"]
    words += [*GENTLE, *MODES[mode], "--run.tensorboard", "false"]
    faults = [f"kill:rank={KILLED},step={AT_STEP}"] if is_killed else []
    train = [*command, "train", str(RECIPE), *words]
    ranks = ["--nproc-per-node", str(RANKS), "--run.folder", str(folder)]
    trained = _run([*train, *ranks], environment(*faults))
    needs_all = "sharded" in MODES[mode]
    if is_killed and needs_all and trained.returncode == KINDS["killed"].exit_code:
        start, folder = folder, folder.with_name(RESUMED)
        ranks = ["--nproc-per-node", str(RANKS - 1), "--run.folder", str(folder)]
        trained = _run([*train, *ranks, "--resume", str(start)], {})
    if trained.returncode:
        raise SystemExit(f"{mode}: exit code {trained.returncode}\n{trained.stderr[-3000:]}")
    is_same = _is_same(folder)
    said = json.loads((folder / "result.json").read_text("utf-8"))["synchrony"]
    lost = STEPS * LEAVES - said["gradients"] - said["dropped"]
    row = {"killed": is_killed, "is_same": is_same, "never_applied": lost}
    return {**row, **(_held_up(folder) if is_killed and not needs_all else {})}


def replay_kept(runs: Path) -> None:
    """Replays each run of a folder. Raises: SystemExit with those that come to other bits."""
    found = {folder.name: _is_same(folder) for folder in sorted(runs.iterdir())}
    others = [name for name, is_same in found.items() if not is_same]
    print(f"{len(found) - len(others)} of {len(found)} runs replayed to the same bits")
    if others or not found:
        raise SystemExit(f"other bits: {'; '.join(others) or 'no run there'}")


def _is_same(folder: Path) -> bool:
    """Whether a run's replay comes to its bits. Raises: SystemExit if it does not end."""
    again = _run([sys.executable, "-m", "firecaffe", "replay", str(folder)], {})
    if again.returncode not in (0, NotIdenticalError.exit_code):
        raise SystemExit(f"{folder}: exit code {again.returncode}\n{again.stderr[-3000:]}")
    return again.returncode == 0


def _run(command: list[str], variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=600
    )


def _held_up(folder: Path) -> dict[str, float]:
    """What the loss of a learner held up, by the log."""
    pushes, works, lost = list[float](), dict[int, tuple[float, Work]](), list[float]()
    noticed_s = 0.0
    for event in logged(folder):
        match event:
            case Pull():
                works[event.work.learner] = event.time_s, event.work
            case Push():
                pushes.append(event.time_s)
                works.pop(event.work.learner, None)
            case Lose():
                lost.append(event.time_s)
                if event.learner in works:
                    noticed_s = max(noticed_s, event.time_s - works[event.learner][0])
    gaps = [(later - earlier, earlier, later) for earlier, later in pairwise(pushes)]
    around = [gap for gap, _, later in gaps if later >= lost[0] - noticed_s][:20]
    return {
        "noticed_s": noticed_s,
        "longest_gap_s": max(around),
        "median_gap_s": median(gap for gap, *_ in gaps),
    }


if __name__ == "__main__":
    main()
