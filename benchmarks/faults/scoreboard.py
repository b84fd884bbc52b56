"""The scoreboard: every fault at three ranks, here and under torchrun with DDP.

    python -m benchmarks.faults.scoreboard --page benchmarks/results/faults.md   # 12 minutes

Each fault happens to rank 1 in a run that is left to end, and in one that restarts. The links of an
emulated cluster (`benchmarks.emulated.virtual_cluster`, root) are cut and slowed; elsewhere these
two rows are left out.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.emulated.cluster_run import Rank
from benchmarks.emulated.namespaces import ClusterUnavailableError
from benchmarks.emulated.virtual_cluster import VirtualCluster
from benchmarks.faults.on_purpose import environment
from benchmarks.kit.small_run import (
    RECIPE,
    command,
    pack_photos,
    photo_recipe,
    state_of,
    steps_of,
)
from firecaffe.faults import KINDS
from firecaffe.runs.environment import commit, cpu_name
from firecaffe.runs.rank_times import explain

RANKS, VICTIM, STEP, STEPS, EVERY = 3, 1, 90, 120, 20
SILENT_S = 3.0
LIMIT_S = 150.0

WORDS = (
    *("--train.steps", str(STEPS), "--checkpoint.every", str(EVERY)),
    *("--exchange.silent_s", str(SILENT_S)),
)


@dataclass(frozen=True)
class Case:
    """A fault, what it must be called, and when at the latest (None: the run goes on)."""

    kind: str
    deadline_s: float = 5.0
    restarts: bool = True
    """Whether a restart mends it."""


CASES = {
    "kill": Case("killed"),
    "freeze": Case("frozen", SILENT_S + 5.0),
    "exception": Case("exception"),
    "out_of_memory": Case("out_of_memory"),
    "data_end": Case("data", restarts=False),
    "truncated_shard": Case("data", restarts=False),
    "preempt": Case("preempted"),
    "launcher_killed": Case("launcher_killed"),
}

KILL = f"kill:rank={VICTIM},step={STEP}"

GOES_ON = {
    "slow": [f"slow:rank={VICTIM},step=2,factor=3"],
    "disk_full": ["disk_full:step=60"],
    "truncated_checkpoint": ["truncated_checkpoint:step=80", KILL],
    "flipped_byte_checkpoint": ["flipped_byte_checkpoint:step=80", KILL],
}
"""Faults that do not end the run, or from which it is restarted."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    code: int | None
    """None: it was given up after LIMIT_S."""
    named: int | None
    """The rank that it blames; None where it blames none."""
    kind: str
    taken_s: float
    """From the fault to the end of the launcher (of the last rank, where that is gone)."""


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--page", type=Path, help="where the result page goes")
    parser.add_argument("--faults", nargs="+", choices=[*CASES, *GOES_ON, "link_cut", "link_slow"])
    given = parser.parse_args()
    chosen = given.faults or [*CASES, *GOES_ON, "link_cut", "link_slow"]
    rows, wrong = [], []
    with tempfile.TemporaryDirectory(prefix="firecaffe-faults-") as name:
        parent = Path(name)
        recipe = parent / "recipe.toml"
        recipe.write_text(RECIPE)
        photos = parent / "photos.toml"
        photos.write_text(photo_recipe(pack_photos(parent)))
        run(ours(recipe, parent / "alone", 1))
        state = state_of(parent / "alone")
        for fault in chosen:
            try:
                own = photos if fault == "truncated_shard" else recipe
                row, faults = board(fault, own, parent / fault, state)
            except ClusterUnavailableError as error:
                row, faults = [fault, f"not run: {error}", *[""] * 8], []
            print(" | ".join(row), flush=True)
            rows.append(row)
            wrong += faults
    for line in wrong:
        print(f"WRONG: {line}", file=sys.stderr)
    if given.page is not None:
        given.page.write_text(page(rows))
    return 1 if wrong else 0


def board(fault: str, recipe: Path, folder: Path, state: str) -> tuple[list[str], list[str]]:
    """One line of the scoreboard, and what in it is not as it must be."""
    folder.mkdir()
    if fault in ("link_cut", "link_slow"):
        return board_link(fault, recipe, folder, state)
    if fault in GOES_ON:
        return board_going_on(fault, recipe, folder, state)
    case = CASES[fault]
    faults = environment(f"{fault}:rank={VICTIM},step={STEP}")
    first = train_until_end(ours(recipe, folder / "ends", RANKS), folder / "ends", faults)
    wrong = check(fault, first, case)
    after = "not restarted"
    if case.restarts:
        words = ["--max-restarts", "1"]
        if case.kind in ("preempted", "launcher_killed"):
            words, faults = ["--resume", str(folder / "ends")], {}
        run(ours(recipe, folder / "goes_on", RANKS, *words), faults)
        after, others = compare(fault, folder / "goes_on", state)
        wrong += others
    theirs = ddp(fault, folder / "ddp")
    return [fault, *said(first), f"{case.deadline_s:g}", after, *said(theirs)], wrong


def board_going_on(
    fault: str, recipe: Path, folder: Path, state: str
) -> tuple[list[str], list[str]]:
    faults = GOES_ON[fault]
    words = ("--max-restarts", "1") if KILL in faults else ()
    done = run(ours(recipe, folder / "run", RANKS, *words), environment(*faults))
    after, wrong = compare(fault, folder / "run", state)
    named = "-"
    if fault == "slow":
        slow = explain(folder / "run").slow
        named = ", ".join(f"{each.rank} {each.cause} {each.factor:.1f}x" for each in slow[:1])
        if [(each.rank, each.cause) for each in slow[:1]] != [(VICTIM, "computes")]:
            wrong.append(f"slow: explain names {slow}")
    if done.returncode:
        wrong.append(f"{fault}: exit code {done.returncode}: {done.stderr}")
    return [fault, "goes on", named, str(done.returncode), "-", "-", after, *["-"] * 4], wrong


def board_link(fault: str, recipe: Path, folder: Path, state: str) -> tuple[list[str], list[str]]:
    """On three emulated hosts of one rank each, without a launcher: every rank says what it saw."""
    faults = environment(f"{fault}:rank={VICTIM},step=40,rate=100mbit")
    training = ours(recipe, folder / "run", 1, "--exchange.timeout_s", "60")
    wrong: list[str] = []
    with VirtualCluster(RANKS, 1_000_000_000) as cluster:
        codes, lines = ends_of(cluster.start(training, environment=faults))
        cut_s = victims_last_step_s(folder / "run")
        taken_s = time.time() - cut_s
    if fault == "link_slow":
        slow = [each for each in explain(folder / "run").slow if each.cause == "link"]
        after, wrong = compare(fault, folder / "run", state)
        named = ", ".join(f"{each.rank} {each.cause} {each.factor:.1f}x" for each in slow[:1])
        if [each.rank for each in slow[:1]] != [VICTIM] or any(codes):
            wrong.append(f"link_slow: explain names {slow}, exit codes {codes}")
        return [fault, "goes on", named, str(codes[0]), "-", "-", after, *["-"] * 4], wrong
    named_by = [
        int(found[1]) for found in (re.search(r"rank \d: rank (\d)", x) for x in lines) if found
    ]
    if named_by != [VICTIM] * RANKS or set(codes) != {KINDS["unreachable"].exit_code}:
        wrong.append(f"link_cut: ranks {named_by} named, exit codes {codes}: {lines}")
    with VirtualCluster(RANKS, 1_000_000_000) as cluster:
        (folder / "ddp").mkdir()
        script = [
            "benchmarks/faults/ddp_victim.py",
            fault,
            str(VICTIM),
            str(STEP),
            str(folder / "ddp"),
        ]
        their_codes, their_lines = ends_of(cluster.start([sys.executable, *script]))
        their_s = time.time() - (folder / "ddp" / "injected").stat().st_mtime
    blamed = "none" if not any(f"rank {VICTIM}" in line for line in their_lines) else str(VICTIM)
    run(ours(recipe, folder / "goes_on", RANKS, "--resume", str(folder / "run")))
    after, others = compare(fault, folder / "goes_on", state)
    wrong += others
    row = [fault, "unreachable", str(named_by[0]), str(codes[0]), f"{taken_s:.1f}"]
    theirs = ["RuntimeError", blamed, str(their_codes[0]), f"{their_s:.1f}"]
    return [*row, f"{SILENT_S + 5.0:g}", after, *theirs], wrong


def ends_of(ranks: list[Rank]) -> tuple[list[int], list[str]]:
    """Exit codes and last lines."""
    codes = [rank.wait(LIMIT_S) for rank in ranks]
    return codes, [(rank.stderr.strip().splitlines() or [""])[-1] for rank in ranks]


def ours(recipe: Path, folder: Path, workers: int, *words: str) -> list[str]:
    return command(recipe, folder, workers, *WORDS, *words)


def run(
    training: list[str], faults: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """faults: the environment that makes them happen."""
    return subprocess.run(
        training,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env={**os.environ, **(faults or {})},
    )


def train_until_end(training: list[str], folder: Path, faults: Mapping[str, str]) -> Outcome:
    done = run(training, faults)
    until = time.monotonic() + LIMIT_S
    while done.returncode == -9 and time.monotonic() < until:
        if (folder / "fault.json").exists():
            break
        time.sleep(0.05)
    taken_s = time.time() - victims_last_step_s(folder)
    fault = json.loads((folder / "fault.json").read_text())
    code = fault["exit_code"] if done.returncode == -9 else done.returncode
    return Outcome(code, fault["rank"], fault["kind"], taken_s)


def victims_last_step_s(folder: Path) -> float:
    return (folder / f"timings/rank-{VICTIM}.jsonl").stat().st_mtime


def check(fault: str, outcome: Outcome, case: Case) -> list[str]:
    wrong = []
    of_all = case.kind == "launcher_killed"
    if (outcome.named != VICTIM and not of_all) or outcome.kind != case.kind:
        wrong.append(f"{fault}: {outcome.kind} of rank {outcome.named}, not {case.kind}")
    if outcome.code != KINDS[case.kind].exit_code:
        wrong.append(f"{fault}: exit code {outcome.code}")
    if outcome.taken_s > case.deadline_s:
        wrong.append(f"{fault}: {outcome.taken_s:.1f} s, later than {case.deadline_s:g} s")
    return wrong


def compare(fault: str, folder: Path, state: str) -> tuple[str, list[str]]:
    """Whether the run ended in the undisturbed state, with every step once."""
    try:
        is_same = state_of(folder) == state
    except OSError:
        return "did not end", [f"{fault}: the run did not end"]
    steps = steps_of(folder)
    whole = list(range(steps[0], STEPS + 1))
    lost, twice = len(set(whole) - set(steps)), len(steps) - len(set(steps))
    words = f"{'same bits' if is_same else 'OTHER BITS'}, {lost} lost, {twice} twice"
    return words, [] if is_same and steps == whole else [f"{fault}: {words}"]


def said(outcome: Outcome) -> list[str]:
    named = "none" if outcome.named is None else str(outcome.named)
    code = "none" if outcome.code is None else str(outcome.code)
    return [outcome.kind, named, code, f"{outcome.taken_s:.1f}"]


def ddp(fault: str, folder: Path) -> Outcome:
    """The same under torchrun; faults that are ours alone are told as such."""
    if fault == "truncated_shard":
        return Outcome(None, None, "as data_end", float("nan"))
    folder.mkdir()
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    script = ["benchmarks/faults/ddp_victim.py", fault, str(VICTIM), str(STEP), str(folder)]
    training = [*start, "--nproc-per-node", str(RANKS), *script]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        training, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            _, errors = process.communicate(timeout=LIMIT_S)
            code: int | None = process.returncode
        except subprocess.TimeoutExpired:
            process.kill()
            subprocess.run(["pkill", "-9", "-f", str(folder)], check=False)
            _, errors = process.communicate()
            code = None
    taken_s = time.time() - (folder / "injected").stat().st_mtime
    cause = re.search(r"Root Cause.*?rank\s*:\s*(\d+)", errors, re.DOTALL)
    subprocess.run(["pkill", "-9", "-f", str(folder)], check=False)
    kinds = {"Signal ": "signal", "RuntimeError": "RuntimeError", "": "error"}
    kind = next(kind for word, kind in kinds.items() if word in errors)
    return Outcome(code, int(cause[1]) if cause else None, kind if code else "ends", taken_s)


HEAD = """# Faults at three ranks

    {command}

Every fault happens to rank {victim} of {ranks}, which train LeNet for {steps} steps with a
checkpoint every {every} and `exchange.silent_s` {silent:g}; most at step {step}. Beside it the same
fault in a training by torchrun and DDP as the tutorials write it (Gloo, time-out 15 s;
`benchmarks/faults/ddp_victim.py`). {cpu}, {cores} cores, torch {torch}, commit {commit}, {date};
n = 1 each.

**s** are seconds from the last step that rank {victim} finished to the end of the launcher (of all
ranks, where it is the launcher that is killed, or where there is none: on the emulated hosts of the
links). **after** a restart (a resume, where the run was asked to stop; or at the end of a run that
goes on): whether the state is that of an undisturbed run on one worker, and how many steps the
record has lost or has twice. Of `slow` and `link_slow`, the rank is the one that
`firecaffe explain` names.

"""

HEADER = ["fault", "told as", "rank", "exit", "s", "deadline, s", "after"]
HEADER += ["DDP: told as", "rank", "exit", "s"]


def page(rows: list[list[str]]) -> str:
    head = HEAD.format(
        command=" ".join(["python", "-m", "benchmarks.faults.scoreboard", *sys.argv[1:]]),
        victim=VICTIM,
        ranks=RANKS,
        steps=STEPS,
        every=EVERY,
        silent=SILENT_S,
        step=STEP,
        cpu=cpu_name(),
        cores=os.cpu_count(),
        torch=torch.__version__,
        commit=commit(),
        date=time.strftime("%Y-%m-%d", time.gmtime()),
    )
    table = [HEADER, ["---"] * len(HEADER), *rows]
    return head + "\n".join(f"| {' | '.join(row)} |" for row in table) + "\n"


if __name__ == "__main__":
    sys.exit(main())
