"""The page of `benchmarks.training.measured_shares`, from its raw rows."""

from pathlib import Path
from statistics import median

from benchmarks.kit import raw_lines


def make_page(speed: Path, exchange: Path) -> str:
    """The page of both measurements."""
    of_speed, of_exchange = (raw_lines.read(path, "conditions")[0] for path in (speed, exchange))
    runs, steps = raw_lines.read(speed, "run"), raw_lines.read(exchange, "step")
    rates = {kind: [row["images_per_s"] for row in runs if row["shares"] == kind] for kind in KINDS}
    factors = [b / a for a, b in zip(rates["equal"], rates["measured"], strict=True)]
    last = next(row for row in reversed(runs) if row["shares"] == "measured")
    speed_rows = [
        f"| {kind} | {_cells(found, '.1f')} |"
        for kind, found in (*rates.items(), ("measured / equal", factors))
    ]
    waits = {
        name: [row["exposed_s"] * 1e3 for row in steps if row["variant"] == name]
        for name in dict.fromkeys(row["variant"] for row in steps)
    }
    bytes_of = {row["variant"]: row["sent_bytes"] for row in steps}
    first = median(next(iter(waits.values())))
    exchange_rows = [
        f"| {name} | {_cells(found, '.0f')} | {median(found) / first:.2f} "
        f"| {bytes_of[name] / 1e6:.1f} |"
        for name, found in waits.items()
    ]
    return PAGE.format(
        cores=of_speed["cores"],
        cpu=of_speed["cpu"],
        torch=of_speed["torch"],
        commit=of_speed["commit"],
        exchange_commit=of_exchange["commit"],
        processors=of_speed["processors"],
        rate=of_speed["rate_bits_per_s"] // 10**6,
        exchange_rate=of_exchange["rate_bits_per_s"] // 10**6,
        num_leaves=last["num_leaves"],
        shares=", ".join(map(str, last["micro_batches_by_rank"])),
        digest=last["state_sha256"][:12],
        runs=len(runs),
        speed_rows="\n".join(speed_rows),
        exchange_rows="\n".join(exchange_rows),
    )


KINDS = ("equal", "measured")


def _cells(found: list[float], form: str) -> str:
    form = ".2f" if max(found) < 10 else form
    middle, low, high = (format(each, form) for each in (median(found), min(found), max(found)))
    return f"{len(found)} | {middle} | {low} - {high}"


PAGE = """# Measured shares

    python -m benchmarks.training.measured_shares speed --out SPEED.jsonl
    python -m benchmarks.training.measured_shares exchange --out EXCHANGE.jsonl

On {cores} cores of a shared {cpu}, torch {torch}: 4 emulated
hosts, one rank each.

## Images/s if one host has half the processors

Hosts have {processors} of a core and no more, links of {rate} Mbit/s. googlenet_small_bn on
generated images, {num_leaves} micro-batches of 4 a step. Runs with equal and with measured shares
take turns; a run's rate is by the clock from its 7th step on, with all decisions. Commit {commit}.

| shares | n | images/s, median | from - to |
|---|---|---|---|
{speed_rows}

Measured shares came to {shares} micro-batches in the last run. All {runs} runs ended in the bits of
one worker, {digest}. Half the processors would be worth 1.75. A host does its part of the exchange
with the same processors, so that the slow one is further behind than that: its share tells how far.

## What shares of any size cost on the network

Links of {exchange_rate} Mbit/s, 8.4 MB of gradients, 32 micro-batches. Layers sleep, on each host
so long that all are done at the same time whatever their shares; steps take turns. "exposed" is
what a step waits after its backward (the mean over ranks), "sent" the most that a rank sends in a
step. Commit {exchange_commit}.

| shares, exchange | n | exposed ms, median | from - to | of the first | sent MB |
|---|---|---|---|---|---|
{exchange_rows}
"""
