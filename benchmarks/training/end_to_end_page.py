"""The page of the end-to-end benchmark, from its raw lines alone."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.kit import raw_lines
from benchmarks.training.end_to_end_recipe import (
    ALONE,
    BASE_LR,
    DDP,
    GLOBAL_BATCH_SIZE,
    HOSTS,
    LEVEL,
    MICRO_BATCH_SIZE,
    OURS,
    RING,
    SIDE,
    UNCOMPRESSED,
)
from firecaffe.runs.statistics import mean_of

MIN_SPEEDUP = 3.0
MAX_LOSS_POINTS = 0.3

Rows = list[dict[str, Any]]

INTRODUCTION = f"""\
# End to end on slow links: DDP, ours, and every codec

`nin_cifar` (966,986 parameters, 3.87 MB of gradients) with nin_small's changes, so that it learns
within an epoch, on CIFAR-10 at {SIDE} x {SIDE} pixels, cropped and mirrored at random. Global
batches of {GLOBAL_BATCH_SIZE} in micro-batches of {MICRO_BATCH_SIZE}, SGD with momentum 0.9 and
weight decay 0.0001, a learning rate that rises to {BASE_LR} in a twentieth of the steps and falls
linearly to 0, `halving_doubling` (`{RING}`: `ring`, whose bits depend on the number of workers, and
which DDP has too), compressors at level {LEVEL} of the micro-batch tree: each of {HOSTS} hosts
encodes one node. The images are a lossy JPEG re-encoding, halved, so accuracies compare with one
another, not with published ones. The commands are those of `benchmarks/training/end_to_end.py`.

Why this size: FireCaffe's NiN takes a K20 about 0.27 s for its share of 32 images (5.8 days for 47
epochs on one), and its 30.4 MB take at least 3.8 s through an all-reduce over four links of
100 Mbit/s, 14 times as long. Here four hosts share two cores. With images of {SIDE} pixels the
exchange still takes several times as long as the computation (the row without exchange tells), so
that communication is measured and not the lack of cores.
"""

HOW_SPEED = f"""
## Images per second

One rank on each of {HOSTS} emulated hosts (`benchmarks/emulated/virtual_cluster.py`). Every rank
holds every variant; blocks of steps take turns, and who goes first changes. DDP is plain torch over
Gloo with its default buckets, our malloc setting (which favors it) and each host's share of the
batch in one piece. Ratios are of blocks of the same round. *Exposed* is the share of the step that
waited for communication: ours reports it; DDP's is its time above `{ALONE}`, which is DDP under
`no_sync`. Where four ranks share two cores, one computes while another waits, so the two do not
quite compare.
MB a step: what one host sends, headers included, by its link's counter.
"""

HOW_APART = """
### Each in processes of its own

The same without a codec, where whole processes take turns: DDP has glibc's malloc, as torchrun
starts a user's script, and not our setting.
"""

HOW_ACCURACY = """
## Accuracy after the same samples

The number of workers changes no bit, so these were trained by `firecaffe.train` on two local
workers at full speed with the same recipe; below is the check that hosts come to the same weights.
Seeds decide initial weights, the order of samples, augmentation and dropout. Differences are to
`none` of the same seed and as many samples, in points; the standard error is that of their mean.
"""


def make_page(speed: Path, bits: Path, accuracy: Path) -> str:
    """A part for which there are no lines yet is left out."""
    blocks, trainings = raw_lines.read(speed, "block"), raw_lines.read(accuracy, "accuracy")
    parts = [INTRODUCTION]
    ratios: dict[str, list[float]] = {}
    if blocks:
        ratios = ratios_to_ddp(blocks)
        parts += [
            HOW_SPEED,
            _speed_table(blocks, ratios),
            _verified(speed),
            _conditions(speed, blocks),
        ]
    apart = raw_lines.read(speed, "apart")
    if apart:
        parts += [HOW_APART, _apart_table(apart)]
    differences: dict[str, list[float]] = {}
    if trainings:
        parts.append(HOW_ACCURACY)
    for steps in sorted({row["steps"] for row in trainings}):
        alike = [row for row in trainings if row["steps"] == steps]
        found = differences_in_points(alike)
        parts.append(_accuracy_table(alike, found))
        # The verdict is that of each codec's longest training.
        differences |= {variant: values for variant, values in found.items() if values}
    if same := raw_lines.read(bits, "same_bits"):
        parts.append(_same_bits(same))
    if blocks and trainings:
        parts += ["\n## The goal\n\n", _verdict(ratios, ratios_to_ddp(apart), differences)]
    return "".join(parts)


def ratios_to_ddp(blocks: Rows) -> dict[str, list[float]]:
    """How many times DDP's images/s, by variant, round by round."""
    ddp_s = {block["round"]: block["block_s"] for block in blocks if block["variant"] == DDP}
    return {
        variant: [
            ddp_s[block["round"]] / block["block_s"]
            for block in blocks
            if block["variant"] == variant and block["round"] in ddp_s
        ]
        for variant in (DDP, RING, *OURS, ALONE)
    }


def differences_in_points(trainings: Rows) -> dict[str, list[float]]:
    """Top-1 above that of the same seed uncompressed, by variant, seed by seed."""
    plain = {row["seed"]: row["top1"] for row in trainings if row["variant"] == UNCOMPRESSED}
    return {
        variant: [
            100 * (row["top1"] - plain[row["seed"]])
            for row in trainings
            if row["variant"] == variant and row["seed"] in plain
        ]
        for variant in OURS
    }


def _speed_table(blocks: Rows, ratios: dict[str, list[float]]) -> str:
    alone_s = statistics.median(_step_s(block) for block in blocks if block["variant"] == ALONE)
    table = []
    for variant, of_variant in ratios.items():
        own = [block for block in blocks if block["variant"] == variant]
        step_s = statistics.median(_step_s(block) for block in own)
        if variant == DDP:
            exposed = f"{1 - alone_s / step_s:.0%}"
        elif variant == ALONE:
            exposed = ""
        else:
            exposed = f"{statistics.median(b['exposed_s'] / b['block_s'] for b in own):.0%}"
        sent_bytes = statistics.median(block["sent_bytes"] / block["steps"] for block in own)
        table.append(
            [
                variant,
                f"{GLOBAL_BATCH_SIZE / step_s:.0f}",
                f"{1000 * step_s:.0f}",
                f"{statistics.median(of_variant):.2f}",
                f"{min(of_variant):.2f} to {max(of_variant):.2f}",
                exposed,
                f"{sent_bytes / 1e6:.2f}",
                f"{statistics.median(block['ranks_cpu_share'] for block in own):.0%}",
                str(len(of_variant)),
            ]
        )
    head = ["variant", "images/s", "step ms", "times DDP's, median", "ratios", "exposed"]
    return _table([*head, "MB a step", "CPU of these ranks", "n"], table)


def _verified(speed: Path) -> str:
    row = raw_lines.read(speed, "verified")[-1]
    results = {name: row["results"][name] for name in OURS[1:]}
    plain = max(row["results"][name]["relative_difference"] for name in (RING, UNCOMPRESSED))
    cosines = ", ".join(f"{name} {found['cosine']:.3f}" for name, found in results.items())
    return (
        "\nVerified before: over the same batch and weights ours and DDP come to the same gradient "
        f"within {plain:.0e} of its norm. What the codecs send of it in {row['steps']} steps, "
        f"added up, is finite and has its direction, by the cosine: {cosines}.\n"
    )


def _conditions(speed: Path, blocks: Rows) -> str:
    row = raw_lines.read(speed, "conditions")[-1]
    words = ", ".join(f"{name} {value}" for name, value in row.items() if name != "kind")
    busy = statistics.median(block["cpu_busy_share"] for block in blocks)
    others = statistics.median(b["cpu_busy_share"] - b["ranks_cpu_share"] for b in blocks)
    resent = sum(block["retransmitted_segments"] for block in blocks)
    return (
        f"\nConditions: {words}. {blocks[0]['steps']} steps a block. Processors {busy:.0%} busy "
        f"(median), {max(0.0, others):.0%} by the kernel's work on packets and by other programs; "
        f"{resent} segments sent again.\n"
    )


def _accuracy_table(trainings: Rows, differences: dict[str, list[float]]) -> str:
    table = []
    for variant, of_variant in differences.items():
        own = [row for row in trainings if row["variant"] == variant]
        if not own:
            continue
        points = [100 * row["top1"] for row in own]
        table.append(
            [
                variant,
                f"{statistics.mean(points):.2f}",
                ", ".join(f"{point:.2f}" for point in points),
                f"{_deviation(points):.2f}",
                f"{statistics.mean(of_variant):+.2f}",
                f"{_error(of_variant):.2f}" if variant != UNCOMPRESSED else "",
                f"{statistics.mean(row['loss'] for row in own):.3f}",
                str(len(own)),
            ]
        )
    head = ["compressor", "top-1 %, mean", "by seed", "deviation", "difference"]
    samples = trainings[0]["steps"] * GLOBAL_BATCH_SIZE
    return (
        f"\n{samples:,} samples each ({trainings[0]['steps']} steps); "
        "top-1 on the 10,000 test images.\n"
        + _table([*head, "standard error", "last step's loss", "n"], table)
    )


def _same_bits(rows: Rows) -> str:
    wrong = [row["variant"] for row in rows if row["hosts"] != row["workers"]]
    names = ", ".join(f"{row['variant']} {row['hosts'][:8]}" for row in rows)
    if wrong:
        return f"\n**Not the same weights on hosts and on workers: {', '.join(wrong)}.**\n"
    return (
        f"\nThe same weights (SHA-256) after {rows[0]['steps']} steps on {HOSTS} hosts and on two "
        f"local workers: {names}.\n"
    )


def _apart_table(blocks: Rows) -> str:
    table = []
    for variant, ratios in ratios_to_ddp(blocks).items():
        own = [
            block["samples"] / block["block_s"] for block in blocks if block["variant"] == variant
        ]
        if own:
            cells = [f"{statistics.median(own):.1f}", f"{statistics.median(ratios):.3f}"]
            spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
            table.append([variant, *cells, spread, str(len(own))])
    return _table(["variant", "images/s", "times DDP's, median", "ratios", "n"], table)


def _verdict(
    ratios: dict[str, list[float]],
    apart: dict[str, list[float]],
    differences: dict[str, list[float]],
) -> str:
    speed = {variant: statistics.median(of_variant) for variant, of_variant in ratios.items()}
    fast = [variant for variant in OURS[1:] if speed[variant] >= MIN_SPEEDUP]
    trained = {variant: differences[variant] for variant in fast if differences.get(variant)}
    unknown = [variant for variant in OURS if not differences.get(variant)]
    plain = ", ".join(f"{variant} {speed[variant]:.3f}" for variant in (UNCOMPRESSED, RING))
    by_itself = ", ".join(
        f"{variant} {statistics.median(apart[variant]):.3f}"
        for variant in (UNCOMPRESSED, RING)
        if apart[variant]
    )
    return (
        f"- At least {MIN_SPEEDUP:g} times DDP's images/s: {_names(fast)}.\n"
        + _losses(trained)
        + f"- Uncompressed at least 1.0 of DDP: with our malloc setting for both, {plain}"
        + (f"; as torchrun starts it, {by_itself}.\n" if by_itself else ".\n")
        + (f"- Not trained for their accuracy: {_names(unknown)}.\n" if unknown else "")
    )


def _losses(differences: dict[str, list[float]]) -> str:
    """Whether fast codecs keep the accuracy, as far as their seeds bear: by the whole interval of
    the differences to the same seed uncompressed, at 95 % for all of them together (Bonferroni).
    """
    by_verdict: dict[str, list[str]] = {"within": [], "beyond": [], "not enough seeds to say": []}
    for variant, values in differences.items():
        mean = mean_of(values, len(differences))
        low, high = mean.value - mean.half, mean.value + mean.half
        verdict = "not enough seeds to say"
        if low >= -MAX_LOSS_POINTS:
            verdict = "within"
        elif high < -MAX_LOSS_POINTS:
            verdict = "beyond"
        by_verdict[verdict].append(f"{variant} {mean.value:+.2f} ({low:+.2f} to {high:+.2f})")
    said = "; ".join(f"{verdict}: {_names(names)}" for verdict, names in by_verdict.items())
    return (
        f"- Of these, at most {MAX_LOSS_POINTS} points below uncompressed, by Student's interval "
        f"of the differences by seed, at 95 % for all codecs together: {said}.\n"
    )


def _names(variants: list[str]) -> str:
    return ", ".join(variants) or "no codec"


def _step_s(block: dict[str, Any]) -> float:
    return float(block["block_s"] / block["steps"])


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else float("nan")


def _error(values: Sequence[float]) -> float:
    return float(_deviation(values) / len(values) ** 0.5)


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows), ""])
