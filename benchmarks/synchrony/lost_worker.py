"""A worker of a server is killed: how soon the others compute, and who computes what it had.

    python -m benchmarks.synchrony.lost_worker --page benchmarks/results/lost_worker.md

Three ranks train under firecaffe's launcher. Once the events are some dozens, rank 2 is killed, and
the log is read as it grows:

next    from the kill to the next event of another learner
taken   from the kill to the event by which another learner takes the micro-batch that it had
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.kit.paragraph import paragraph
from benchmarks.kit.small_run import RECIPE, command
from firecaffe.runs.environment import commit, cpu_name

MODES = {
    "asynchronous": ("--synchrony.mode", "asynchronous"),
    "stale, s = 4": ("--synchrony.mode", "stale", "--synchrony.max_staleness", "4"),
    "backup, 2 + 1": ("--synchrony.mode", "backup", "--synchrony.backup_workers", "1"),
}
STEPS, LEAVES = 60, 6
VICTIM, EVENTS, LIMIT_S = 2, 60, 120.0
WORDS = ("--train.steps", str(STEPS), "--solver.base_lr", "0.001", "--run.tensorboard", "false")


@dataclass(frozen=True)
class Kill:
    """What followed one kill."""

    next_s: float
    taken_s: float
    lost_samples: int
    is_same: bool
    """Whether a replay gave the same digests."""


class Log:
    """A run's events, read as they are written."""

    def __init__(self, path: Path) -> None:
        self._path, self._read, self._rest = path, 0, b""
        self.rows: list[dict[str, Any]] = []

    def read(self) -> list[dict[str, Any]]:
        """The rows that are new."""
        if not self._path.exists():
            return []
        with open(self._path, "rb") as file:
            file.seek(self._read)
            data = file.read()
        self._read += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        new = [json.loads(line) for line in lines]
        self.rows += new
        return new


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page", type=Path, help="write the page here")
    parser.add_argument("--kills", type=int, default=10, help="of each mode")
    parser.add_argument("--only", choices=MODES, help="of one mode")
    options = parser.parse_args()
    found: dict[str, list[Kill]] = {name: [] for name in MODES if options.only in (None, name)}
    for number in range(options.kills):
        for name in found:
            with tempfile.TemporaryDirectory() as folder:
                found[name].append(kill_one(Path(folder), MODES[name]))
            print(number, name, found[name][-1], flush=True)
    page = page_of(found, "" if options.only is None else f" --only '{options.only}'")
    print(page)
    if options.page:
        options.page.write_text(page)
    return 0


def kill_one(folder: Path, words: tuple[str, ...]) -> Kill:
    recipe, run = folder / "recipe.toml", folder / "run"
    recipe.write_text(RECIPE)
    training = command(recipe, run, 3, *WORDS, *words)
    with subprocess.Popen(training, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        log, until = Log(run / "events.jsonl"), time.monotonic() + LIMIT_S
        # Until the victim has a micro-batch.
        while len(log.rows) < EVENTS or (had := held(log.rows)) is None:
            assert time.monotonic() < until, "no events"
            log.read()
            time.sleep(0.001)
        os.kill(rank_of(process.pid, VICTIM), signal.SIGKILL)
        killed_s = time.monotonic()
        log.read()
        had = held(log.rows) or had  # it may have brought that, and taken another
        next_s = taken_s = float("nan")
        while taken_s != taken_s and process.poll() is None:
            for row in log.read():
                work = row.get("work", [VICTIM])
                if work[0] != VICTIM and next_s != next_s:
                    next_s = time.monotonic() - killed_s
                if row["event"] == "pull" and work[0] == VICTIM:
                    had = work[1:3]
                elif row["event"] == "pull" and work[1:3] == had:
                    taken_s = time.monotonic() - killed_s
                elif row["event"] == "push" and work[0] == VICTIM:
                    had = None
            time.sleep(0.001)
        errors = process.stderr.read().decode() if process.stderr else ""
    assert process.returncode == 0, errors
    row = json.loads((run / "result.json").read_text())["synchrony"]
    replay = [sys.executable, "-m", "firecaffe", "replay", str(run)]
    is_same = subprocess.run(replay, stdout=subprocess.DEVNULL, check=False).returncode == 0
    lost = 4 * (LEAVES * STEPS - row["gradients"] - row["dropped"])
    return Kill(next_s, taken_s, lost, is_same)


def held(rows: list[dict[str, Any]]) -> list[int] | None:
    """The micro-batch that the victim has; None if it has none."""
    own = [row for row in rows if row.get("work", [None])[0] == VICTIM]
    return own[-1]["work"][1:3] if own and own[-1]["event"] == "pull" else None


def rank_of(launcher: int, rank: int) -> int:
    """The process of a rank."""
    return next(
        each.pid
        for each in psutil.Process(launcher).children()
        if each.environ().get("RANK") == str(rank)
    )


def page_of(found: dict[str, list[Kill]], only: str = "") -> str:
    kills = len(next(iter(found.values())))
    lines = [
        "# A killed worker of a server",
        "",
        f"    python -m benchmarks.synchrony.lost_worker{only}"
        " --page benchmarks/results/lost_worker.md",
        "",
        paragraph(
            f"""Three ranks train LeNet under firecaffe's launcher on one host of two cores, in
            micro-batches of 4 samples. Rank {VICTIM} is killed (SIGKILL) while it has a
            micro-batch; {kills} kills a mode, each in a run of its own. **next** is the time from
            the kill to the next event of another learner in `events.jsonl`, **taken** that to the
            event by which another learner takes the micro-batch that it had: median, and least to
            most. The log is read every millisecond. **lost** are samples of the training that did
            not come; **replayed** are the runs that `firecaffe replay` computes to the same
            digests. {cpu_name()}, {os.cpu_count()} cores, torch {torch.__version__}, commit
            {commit()}, {time.strftime("%Y-%m-%d")}."""
        ),
        "",
        "| mode | n | next, ms | taken, ms | lost | replayed |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in found.items():
        after = spread([each.next_s for each in row])
        taken = spread([each.taken_s for each in row])
        lost, same = sum(each.lost_samples for each in row), sum(each.is_same for each in row)
        lines.append(f"| {name} | {len(row)} | {after} | {taken} | {lost} | {same} |")
    return "\n".join([*lines, ""])


def spread(values: list[float]) -> str:
    known = sorted(1000 * value for value in values if value == value)
    if not known:
        return "none"
    missing = f"; {len(values) - len(known)} never" if len(known) < len(values) else ""
    return f"{statistics.median(known):.0f} ({known[0]:.0f} to {known[-1]:.0f}{missing})"


if __name__ == "__main__":
    sys.exit(main())
