"""The parts of benchmarks/results/synchrony.md, from raw rows; one without rows is left out.

    python -m benchmarks.synchrony.synchrony_page --modes ONE_SLOW.jsonl TENTH.jsonl \\
        --local LOCAL.jsonl \\
        --accuracy ACCURACY.jsonl --tried TRIED.jsonl --replays REPLAYS.jsonl

It prints them. The page has those of several machines, one after the other.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from scipy.stats import t

from benchmarks.kit import raw_lines
from benchmarks.synchrony.modes_speed import CASES, MICRO_BATCH_SIZE, MODES, STEPS
from firecaffe.synchrony.config import EVERY_STEP

Rows = list[dict[str, Any]]

SAID = {
    "one_slow": "one of four has half the processors",
    "tenth": "in each tenth step one of four takes five times as long, another each time",
    "each": "a tenth of all micro-batches takes five times as long, at random",
    "2": "two equal ones",
    "3": "three equal ones",
    "4": "four equal ones",
}
assert SAID.keys() == CASES.keys()


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--modes", type=Path, nargs="+", default=[])
    parser.add_argument("--local", type=Path, nargs="+", default=[])
    for word in ("--accuracy", "--tried", "--replays"):
        parser.add_argument(word, type=Path)
    given = parser.parse_args()
    parts = [HEAD, _modes(given.modes)]
    if given.local:
        parts.append(_local(given.local))
    if given.accuracy is not None:
        parts.append(_accuracy(raw_lines.read(given.accuracy, "accuracy")))
    if given.tried is not None:
        parts.append(_tried(raw_lines.read(given.tried, "accuracy")))
    if given.replays is not None:
        parts.append(_replays(raw_lines.read(given.replays, "replay")))
    parts.append(PUBLISHED)
    print("\n".join(parts))


def cells(found: Sequence[float], form: str = ".2f") -> str:
    """n, median, spread."""
    middle, low, high = (format(each, form) for each in (median(found), min(found), max(found)))
    return f"{len(found)} | {middle} | {low} to {high}"


def _conditions(path: Path) -> dict[str, Any]:
    return dict(raw_lines.read(path, "conditions")[0])


def _command(path: Path) -> str:
    case = _conditions(path)["case"]
    return (
        f"    python -m benchmarks.synchrony.modes_speed --case {case} --out {case.upper()}.jsonl"
    )


def _modes(paths: Sequence[Path]) -> str:
    parts, rows, clocks = [], [], []
    for path in paths:
        said, runs = _conditions(path), raw_lines.read(path, "run")
        clock = raw_lines.read(path, "simulated")
        synchronous = {r["round"]: r for r in runs if r["mode"] == EVERY_STEP}
        for mode in MODES:
            own = [row for row in runs if row["mode"] == mode and row["round"] in synchronous]
            if not own:
                continue
            what = f"| {SAID[said['case']]} | {mode} | "
            unit = "steps_per_s" if mode == "backup" else "images_per_s"
            gains = [row[unit] / synchronous[row["round"]][unit] for row in own]
            rates = format(median(row["images_per_s"] for row in own), ".0f")
            rows.append(f"{what}{rates} | {cells(gains)} |")
            other = {row["round"]: row for row in clock if row["mode"] == mode}
            own = [row for row in own if row["round"] in other]
            if own:
                rate = [row[unit] / other[row["round"]][unit] for row in own]
                late = [median(row["staleness"] for row in each) for each in (own, other.values())]
                clocks.append(f"{what}{cells(rate)} | {late[0]:.2f} | {late[1]:.2f} |")
    if rows:
        said = _conditions(paths[0])
        parts.append(
            MODES_PART.format(
                commands="\n".join(map(_command, paths)),
                cores=said["cores"],
                cpu=said["cpu"],
                torch=said["torch"],
                commit=", ".join(sorted({_conditions(path)["commit"] for path in paths})),
                rate=said["rate_bits_per_s"] // 10**6,
                size=MICRO_BATCH_SIZE,
                steps=STEPS,
                rows="\n".join(rows),
                clocks="\n".join(clocks),
            )
        )
    return "\n".join(parts)


def _local(paths: Sequence[Path]) -> str:
    """Of several runs; a round of one is compared with itself alone."""
    said = _conditions(paths[0])
    by_name: dict[str, dict[tuple[Path, int], float]] = {}
    for path in paths:
        for row in raw_lines.read(path, "run"):
            rates = by_name.setdefault(row["variant"], {})
            rates[path, row["round"]] = row["images_per_s"]
    whole = by_name["no exchange"].keys() & by_name["ddp"].keys()
    free, ddp = (by_name[name] for name in ("no exchange", "ddp"))
    rows = []
    for name, rates in by_name.items():
        rounds = sorted(rates.keys() & whole)
        to_free = [rates[each] / free[each] for each in rounds]
        to_ddp = [rates[each] / ddp[each] for each in rounds]
        middle = format(median(rates[each] for each in rounds), ".0f")
        rows.append(
            f"| {name} | {len(rounds)} | {middle} | {median(to_free):.2f} | "
            f"{min(to_free):.2f} to {max(to_free):.2f} | {median(to_ddp):.1f} | "
            f"{min(to_ddp):.1f} to {max(to_ddp):.1f} |"
        )
    return LOCAL_PART.format(
        processors=said["processors"],
        rate=said["rate_bits_per_s"] // 10**6,
        commit=said["commit"],
        rows="\n".join(rows),
    )


def _accuracy(found: Rows) -> str:
    by_name: dict[str, dict[int, float]] = {}
    for row in found:
        by_name.setdefault(row["variant"], {})[row["seed"]] = 100 * row["top1"]
    base, rows = by_name[EVERY_STEP], []
    for name, own in by_name.items():
        seeds = sorted(own.keys() & base.keys())
        line = f"| {name} | {len(seeds)} | {fmean(own[seed] for seed in seeds):.2f} | "
        if name != EVERY_STEP and len(seeds) > 1:
            paired = [own[seed] - base[seed] for seed in seeds]
            half = t.ppf(0.975, len(seeds) - 1) * stdev(paired) / len(seeds) ** 0.5
            middle = fmean(paired)
            line += f"{middle:+.2f} | {middle - half:+.2f} to {middle + half:+.2f} |"
        else:
            line += "| |"
        rows.append(line)
    return ACCURACY_PART.format(rows="\n".join(rows), steps=found[0]["steps"])


def _tried(found: Rows) -> str:
    rows = [f"| {row['variant']} | {100 * row['top1']:.2f} |" for row in found]
    return TRIED_PART.format(rows="\n".join(rows), seed=found[0]["seed"])


def _replays(found: Rows) -> str:
    rows = []
    for mode in dict.fromkeys(row["mode"] for row in found):
        own = [row for row in found if row["mode"] == mode]
        killed = sum(row["killed"] for row in own)
        rows.append(f"| {mode} | {len(own)} | {killed} | {sum(row['is_same'] for row in own)} |")
    return REPLAYS_PART.format(rows="\n".join(rows))


HEAD = """# Synchrony

What [the modes of synchrony](../../docs/explanation/synchrony.md) bring, each against a control of
the same run. [Measured shares](measured_shares.md) and
[late gradients under the simulated clock](synchrony_simulated.md) have pages of their own.
"""

MODES_PART = """
## Modes with a server, by rate

{commands}

{cores} cores of a shared {cpu}, torch {torch}, commit {commit}.
Emulated hosts of 0.4 cores each and no more, links of {rate} Mbit/s, one rank each;
googlenet_small_bn, a micro-batch of {size} images for each host and step, {steps} steps. Modes take
turns in the same processes. "times" is to `every_step` of the same round, in images/s; of `backup`,
which gives one of four micro-batches up, in steps/s.

| hosts | mode | images/s | n | times, median | from - to |
|---|---|---|---|---|---|
{rows}

### The simulated clock against these workers

The policies that trained, under the simulated clock, with what the round's `every_step` took: each
worker's micro-batches and the update. A pull and a push take their bytes over the link's rate. No
number is fitted. "real / simulated" is of rates.

| hosts | mode | n | real / simulated, median | from - to | mean staleness, real | simulated |
|---|---|---|---|---|---|---|
{clocks}
"""

LOCAL_PART = """
## Local training on slow links, by rate

    python -m benchmarks.synchrony.local_speed --data DATA.pt --out LOCAL.jsonl

The network, the recipe and the images of [end_to_end.md](end_to_end.md), on four emulated hosts of
{processors} cores and no more, links of {rate} Mbit/s, commit {commit}. Each has one replica.
"beside" are steps that replicas take while their average is under way. "no exchange" is the same
training before its first average. Before, all variants ended in one worker's bits.

| variant | n | images/s | of no exchange | from - to | times DDP | from - to |
|---|---|---|---|---|---|---|
{rows}
"""

ACCURACY_PART = """
## Local training, by accuracy

    python -m benchmarks.synchrony.local_accuracy --data DATA.pt --out ACCURACY.jsonl \
        --seeds 1 2 3 4 5

The same training to its end, {steps} steps of 32 images, H = 8. Differences are to `every_step` of
the same seed, in points, with their interval at 95 %.

| variant | seeds | top-1, % | difference | interval |
|---|---|---|---|---|
{rows}
"""

TRIED_PART = """
What stands for local training was chosen by seed {seed}, which is none of these, by one training of
each. What a replica's own momentum has gathered in eight steps of a small batch is mostly noise:

| variant | top-1, % |
|---|---|
{rows}
"""

REPLAYS_PART = """
## Replay

    python -m benchmarks.synchrony.replays --out REPLAYS.jsonl

Trainings on three ranks, of some of which one is killed midway; each is computed again by
`firecaffe replay`, on one worker, from its log. A server in parts ends with a killed rank; two
ranks resumed that run.

| mode | runs | with a killed rank | same digests |
|---|---|---|---|
{rows}
"""

SOURCES = (
    (
        "Zhang et al. 2016",
        "small Caffe network, CIFAR-10, 30 learners, 140 epochs",
        "90 % error at a fixed rate; about 18 % for one learner, and for a / τ",
        "[the collapse, and a part of the rescue](synchrony_simulated.md)",
    ),
    (
        "Zheng et al. 2017, table 1",
        "ResNet-20, CIFAR-10, 4 asynchronous workers",
        "error: one worker 8.65, asynchronous 9.27, with delay compensation 8.19 %",
        "[compensation does not rescue momentum, a delay does](synchrony_simulated.md)",
    ),
    (
        "Wang et al. 2020, table 1",
        "ResNet-18, CIFAR-10, 32 workers, 12 local steps",
        "local 91.73, SlowMo 93.20, synchronous 92.66 %",
        "local training, by accuracy",
    ),
    (
        "Chen et al. 2016",
        "Inception, 50 to 200 workers",
        "with backup workers faster and more accurate than asynchronous",
        "modes with a server, by rate",
    ),
)

PUBLISHED = """
## Published figures

Of other networks, clusters and lengths: directions compare, digits do not.

| source | setting | figures | here |
|---|---|---|---|
""" + "\n".join(f"| {' | '.join(row)} |" for row in SOURCES)


if __name__ == "__main__":
    main()
