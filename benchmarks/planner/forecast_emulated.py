"""Forecast against measured step time of real trainings on emulated hosts, a row for each setting.

    python -m benchmarks.planner.forecast_emulated --out ROWS.jsonl
    python -m benchmarks.planner.forecast_emulated --out ROWS.jsonl \\
        --page benchmarks/results/forecast.md

On each cluster `firecaffe check` measures hosts, links, steps and exchanges, and writes a file: one
for all settings without a codec, one for each with one. Each training has its file as
`run.cluster`. It is forecast before its first step, and again after 20 steps with its computing
measured. Exchange, overlap and waiting stay forecasts. `firecaffe explain`'s own reading scores
both by the steps after these. Hosts have equal shares of this machine's processors, and none has
what another leaves: whole processors if there are as many, else parts of them. Needs root.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.emulated.virtual_cluster import VirtualCluster, parse_rate
from benchmarks.kit import raw_lines
from firecaffe.planner.cluster import load_cluster
from firecaffe.runs.rank_times import explain, read_timings
from firecaffe.runs.run_folder import FORECAST, read_run_file
from firecaffe.runs.score import score, score_mode, score_parallel

RECIPE = """
[model]
name = "{model}"
[data]
name = "generated"
[solver]
base_lr = 0.001
[train]
global_batch_size = 64
micro_batch_size = 8
steps = {steps}
eval_batch_size = 500
[run]
tensorboard = false
"""
STEPS = {"lenet": 45, "nin_cifar": 35}
KEPT = 0.1
"""Of processors that hosts share, for the kernel's work on packets."""

SPLIT = 'split = { ip1 = "neurons", ip2 = "inputs" }'
SETTINGS = {
    "tree": '[exchange]\nalgorithm = "tree"',
    "ring": '[exchange]\nalgorithm = "ring"',
    "halving_doubling": '[exchange]\nalgorithm = "halving_doubling"',
    "int8": '[exchange]\ncompressor = "int8"',
    "one_bit": '[exchange]\ncompressor = "one_bit"',
    "shards": '[exchange]\nupdate_at = "shards"',
    "split": f"[parallel]\nmodel = 2\n{SPLIT}",
    "one weird trick": "[parallel]\nmodel = {hosts}\nparts = {hosts}\n"
    f'scheme = "one_weird_trick"\n{SPLIT}',
    "stages": '[parallel]\nstages = ["ip1"]',
    "local": '[synchrony]\nmode = "local"\nreplicas = {hosts}\nlocal_steps = 4',
    "backup": '[synchrony]\nmode = "backup"',
    "stale": '[synchrony]\nmode = "stale"',
    "asynchronous": '[synchrony]\nmode = "asynchronous"',
    "asynchronous, sharded": '[synchrony]\nmode = "asynchronous"\nserver = "sharded"',
}
"""What a recipe says beyond a network and its batch. Layers are named as LeNet's."""

LENET_ALONE = ("split", "one weird trick", "stages")


def settings_of(model: str, hosts: int, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    for name in names:
        if model == "lenet" or name not in LENET_ALONE:
            yield name, SETTINGS[name].replace("{hosts}", str(hosts))


def measure(
    folder: Path, model: str, hosts: int, rate: str, names: Sequence[str], rounds: int, out: Path
) -> None:
    """Check the cluster, then train with all settings in turns. Append a row for each run."""
    folder.mkdir()
    program = [sys.executable, "-m", "firecaffe"]
    cores = os.cpu_count() or 1
    processors = cores // hosts if cores % hosts == 0 else (1 - KEPT) * cores / hosts
    with VirtualCluster(hosts, parse_rate(rate), processors=processors) as cluster:
        for number in range(rounds):
            for name, words in settings_of(model, hosts, names):
                place = folder / name.replace(" ", "-")
                recipe, run = place.with_suffix(".toml"), Path(f"{place}-{number}")
                recipe.write_text(RECIPE.format(model=model, steps=STEPS[model]) + words + "\n")
                codec = name if "compressor" in words else "none"
                file = folder / f"cluster-{codec}.toml"
                if not file.exists():
                    looks = ["check", str(recipe), "--write", str(file), "--folder", str(folder)]
                    cluster.run([*program, *looks], timeout_s=600.0)
                    assert load_cluster(str(file)).device.measured
                words_of_run = ["--run.folder", str(run), "--run.cluster", str(file)]
                cluster.run([*program, "train", str(recipe), *words_of_run], timeout_s=900.0)
                row = {"model": model, "hosts": hosts, "rate": rate, "setting": name, **read(run)}
                raw_lines.append(out, {"kind": "run", **row})
                print(row, file=sys.stderr, flush=True)


def read(run: Path) -> dict[str, Any]:
    """Read a run's forecasts, and its steps after the last of them."""
    timings = read_timings(run)
    scored = score_parallel(run, timings) or score_mode(run, timings)
    made = scored or score(run, timings, explain(run))
    assert made is not None, f"no {FORECAST}"
    step = made.step
    return {
        "first_s": read_run_file(run, FORECAST)["step_s"],
        "is_refined": made.first_s is not None,
        "forecast_s": step.forecast_s,
        "low_s": step.low_s,
        "high_s": step.high_s,
        "measured_s": step.measured_s,
        "lines": made.lines,
    }


KEY = ("model", "hosts", "rate", "setting")


def medians(out: Path) -> list[dict[str, Any]]:
    """Return the median run of each training, by its measured step, with the steps of all."""
    rows = raw_lines.read(out, "run")
    found = []
    for key in dict.fromkeys(tuple(row[word] for word in KEY) for row in rows):
        own = [row for row in rows if tuple(row[word] for word in KEY) == key]
        own.sort(key=lambda row: row["measured_s"])
        middle = {name: value for name, value in own[len(own) // 2].items() if name != "lines"}
        found.append({**middle, "runs_s": [row["measured_s"] for row in own]})
    return found


def errors_of(rows: Sequence[dict[str, Any]], word: str = "forecast_s") -> list[float]:
    return [abs(row[word] / row["measured_s"] - 1) for row in rows]


HEAD = """# Forecast against measured step time

    python -m benchmarks.planner.forecast_emulated --out ROWS.jsonl
    python -m benchmarks.planner.forecast_emulated --out ROWS.jsonl --page FORECAST.md

Real trainings on emulated hosts, one rank each: batch 64 in micro-batches of 8, {cpu}, 2 cores,
torch {torch}, commit {commit}. Two hosts have a core each, four have 45% of one, by control groups.
`firecaffe check` measured each cluster first. The first forecast is from before the first step, the
second one from after 20 steps, with computing measured. Times are of one step, in ms, on the
slowest rank. n is the number of runs; the median run is shown.

An emulated link that was idle lets some bytes pass at once, as no wire does: 6 kB at 100 Mbit/s
between two hosts, 25 kB between four, whose processors have no time for shorter segments, and 49 kB
at 1 Gbit/s.

| network | hosts | link | setting | n | first | second | band | measured | runs | first | second |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""


def by_rate(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a table's row for each rate: errors of both forecasts, and how many are in a band."""
    lines = []
    for rate in dict.fromkeys(row["rate"] for row in rows):
        own = [row for row in rows if row["rate"] == rate]
        first, second = errors_of(own, "first_s"), errors_of(own)
        inside = sum(row["low_s"] <= row["measured_s"] <= row["high_s"] for row in own)
        lines.append(
            f"| {rate} | {len(own)} | {median(first):.1%} | {max(first):.1%} | "
            f"{median(second):.1%} | {max(second):.1%} | {inside} |"
        )
    return lines


def page(out: Path) -> str:
    rows, (conditions,) = medians(out), raw_lines.read(out, "conditions")
    lines = []
    for row in rows:
        first, error = (row[word] / row["measured_s"] - 1 for word in ("first_s", "forecast_s"))
        times = [1e3 * row[word] for word in ("first_s", "forecast_s", "low_s", "high_s")]
        spread = [1e3 * seconds for seconds in (row["runs_s"][0], row["runs_s"][-1])]
        lines.append(
            f"| {' | '.join(str(row[word]) for word in KEY)} | {len(row['runs_s'])} | "
            f"{times[0]:,.0f} | {times[1]:,.0f} | {times[2]:,.0f} to {times[3]:,.0f} | "
            f"{1e3 * row['measured_s']:,.0f} | {spread[0]:,.0f} to {spread[1]:,.0f} | "
            f"{first:+.1%} | {error:+.1%} |"
        )
    lines += ["", "| link | rows | median, first | largest | median, second | largest | in band |"]
    lines += ["| --- | --- | --- | --- | --- | --- | --- |"]
    lines += by_rate(rows)
    return HEAD.format(**conditions) + "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="raw JSON lines")
    parser.add_argument("--hosts", type=int, nargs="+", default=[4])
    parser.add_argument("--models", nargs="+", default=list(STEPS), choices=list(STEPS))
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit"])
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--rounds", type=int, default=1, help="runs of each training")
    parser.add_argument("--page", type=Path, default=None, help="write what OUT has; run nothing")
    given = parser.parse_args(argv)
    if given.page is not None:
        given.page.write_text(page(given.out), encoding="utf-8")
        rows = json.dumps(medians(given.out), indent=1)
        given.page.with_suffix(".json").write_text(rows + "\n", encoding="utf-8")
        return
    raw_lines.begin(given.out)
    with TemporaryDirectory(prefix="firecaffe-forecast-") as place:
        for model in given.models:
            for rate in given.rates:
                for hosts in given.hosts:
                    folder = Path(place) / f"{model}-{rate}-{hosts}"
                    measure(folder, model, hosts, rate, given.settings, given.rounds, given.out)
    print(page(given.out))


if __name__ == "__main__":
    main()
