"""Writes docs/planner.md: what the planner was calibrated with, what it predicted, the error.

    python -m benchmarks.validate_planner [--families FILE.toml] [--page docs/planner.md]

Another file of published rows, of the same form, is tried with --families; its families have one
link with a fitted bandwidth unless `benchmarks.published_families` knows more of them.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks import validate_emulated, validate_firecaffe
from benchmarks.published_allreduce import predict as predict_allreduce
from benchmarks.published_allreduce import read_allreduce
from benchmarks.published_families import Outcome, predict, read_families

FAMILIES = Path(__file__).parent / "published" / "scaling.toml"
TRAININGS = Path(__file__).parent / "results" / "forecast.json"
ACCURATE = 0.1

HEAD = """# The planner, and its record

`firecaffe plan` forecasts a training from descriptions; this page says how, and how far off it was
wherever there is something to hold it to. The record is written by a program:

    {command}

## How it works

- **Computing** (`plan/compute.py`): layer by layer, the longer of arithmetic and memory traffic,
  and an overhead for each call that does not shrink with the batch. That overhead is why small
  batches are slow: it is Hockney's form of an efficiency that grows with the work. Where the
  cluster file has measured steps of the network (`firecaffe bench step`, `firecaffe check`), they
  scale it.
- **Exchange** (`plan/simulate.py`, `plan/rounds.py`): the schedule that is executed, on ports. Up
  to 16 ranks every transfer is simulated, in the pieces and in the order in which ranks work
  through them; connections that share a port take turns there, as TCP's do. Beyond 16, like rounds
  are priced together, by the model of latency, bandwidth and additions, times what pieces saved
  among 16. Tests hold like rounds to the schedule's own, and both to the published formulas.
- **A step** (`plan/timeline.py`): buckets become ready as backward goes on, and as many travel at
  once as there are lanes (beyond 16 ranks, one after the other); what is still on its way at the
  end is exposed. Beside an exchange, computing takes longer by what `firecaffe check` has measured
  there (between hosts, beside a ring). Stragglers: the largest of P normal times.
- **Memory, failures, accuracy, money** (`plan/memory.py`, `plan/goodput.py`, `plan/accuracy.py`):
  by volume; by Daly's formula; by published points, and only between them; by the cluster's
  prices.
- **Bands**: compute times may be off by the device's `error`, exchange times by the link's, both
  to the same side.

What it leaves out: other users of a network, and a GPU's clock. That connections share a port by
turns is TCP's way; it was not held to InfiniBand, NVLink or NCCL.

## Summary

| what | calibrated with | predictions | median error | largest | within {share:.0%} |
| --- | --- | --- | --- | --- | --- |
"""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", type=Path, default=FAMILIES)
    parser.add_argument("--page", type=Path, default=None)
    options = parser.parse_args(argv)
    text = make_page(options.families)
    if options.page is None:
        print(text, end="")
    else:
        options.page.write_text(text, encoding="utf-8")


def make_page(families: Path) -> str:
    titan, titan_errors = validate_firecaffe.page()
    outcomes = [predict(family) for family in read_families(families)]
    family_errors = [row.error for each in outcomes for row in each.rows if row.predicted_per_s]
    reduced, reduce_errors = allreduce_section(families)
    emulated, emulated_errors = validate_emulated.page()
    slow = [error for cell, error in emulated_errors if cell.megabits_per_s == 200]
    fast = [error for cell, error in emulated_errors if cell.megabits_per_s != 200]
    trained, trained_errors = trainings_section()
    rows = [
        ("FireCaffe on Titan, hours", "1 bandwidth", titan_errors),
        ("published throughputs", "see below", family_errors),
        ("published all_reduce times", "see below", reduce_errors),
        ("emulated, 200 Mbit/s, exchanges", "the form, no figure", slow),
        ("emulated, 1 Gbit/s, exchanges", "the form, no figure", fast),
        ("emulated, 200 Mbit/s, steps of trainings", "`firecaffe check`; the form", trained_errors),
    ]
    head = HEAD.format(
        command="python -m benchmarks.validate_planner --page docs/planner.md", share=ACCURATE
    )
    summary = [_summary(*row) for row in rows if row[2]]
    parts = [
        head + "\n".join(summary),
        titan,
        families_section(outcomes),
        reduced,
        emulated,
        trained,
    ]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _summary(what: str, calibrated: str, errors: Sequence[float]) -> str:
    sizes = [abs(error) for error in errors]
    within = sum(size <= ACCURATE for size in sizes)
    return (
        f"| {what} | {calibrated} | {len(sizes)} | {median(sizes):.1%} | {max(sizes):.1%} | "
        f"{within} of {len(sizes)} |"
    )


def families_section(outcomes: Sequence[Outcome]) -> str:
    lines = [
        "## Published throughputs",
        "",
        "`benchmarks/published_families.py` says what is fitted, the same for every family: each",
        "network's compute rate on the fewest devices, each link's bandwidth from one row unless",
        "the source names the link, and a family's slow-down outside the node where it has two or",
        "more such rows. The exchange is a library's (the faster of ring and halving-doubling).",
        "",
    ]
    for outcome in outcomes:
        fitted = "; ".join(f"{name}: {value:.3g}" for name, value in outcome.fitted.items())
        lines += [
            f"### {outcome.name}",
            "",
            f"Source: {outcome.source}. Fitted: {fitted}.",
            "",
            "| network | devices | published, a second | predicted | error |",
            "| --- | --- | --- | --- | --- |",
        ]
        for row in outcome.rows:
            name = row.net.split(":")[1]
            said = "used in a fit |" if row.predicted_per_s is None else (
                f"{row.predicted_per_s:,.5g} | {row.error:+.1%}"
            )  # fmt: skip
            lines.append(f"| {name} | {row.devices} | {row.per_s:,.5g} | {said} |")
        lines.append("")
    return "\n".join(lines)


def trainings_section() -> tuple[str, list[float]]:
    """Of benchmarks/results/forecast.json, which `benchmarks.forecast_training` writes."""
    rows = json.loads(TRAININGS.read_text("utf-8"))
    errors = [row["forecast_s"] / row["measured_s"] - 1 for row in rows]
    lines = [
        "### Real trainings at 200 Mbit/s",
        "",
        "Forecast before the first step from the file that `firecaffe check` wrote there, against",
        "the median step; hardware and parts in [forecast.md](../benchmarks/results/forecast.md),",
        "by the planner and on the links of the commit that it names. How a step is composed, what",
        "`check` measures of it and what counts as a step's time were settled on such trainings.",
        "",
        "| network | hosts | exchange | forecast, ms | measured, ms | error |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row, error in zip(rows, errors, strict=True):
        lines.append(
            f"| {row['model']} | {row['hosts']} | {row['exchange']} | "
            f"{row['forecast_s'] * 1e3:.0f} | {row['measured_s'] * 1e3:.0f} | {error:+.1%} |"
        )
    return "\n".join(lines), errors


def allreduce_section(path: Path) -> tuple[str, list[float]]:
    errors: list[float] = []
    lines = [
        "## Published all_reduce times",
        "",
        "2 lg p · α + (2 (p - 1) / p · β + c(n)) n; `benchmarks/published_allreduce.py` says which",
        "rows are used.",
        "",
    ]
    for family in read_allreduce(path):
        rows, fitted = predict_allreduce(family)
        shown = "; ".join(f"{name}: {value:.3g}" for name, value in fitted.items())
        lines += [
            f"### {family['name']}",
            "",
            f"Source: {family['source']}. Fitted: {shown}.",
            "",
            "| MB | ranks | published, ms | predicted, ms | error |",
            "| --- | --- | --- | --- | --- |",
        ]
        for row in rows:
            place = f"| {row.num_bytes / 1e6:.3g} | {row.ranks} | {row.taken_s * 1e3:.3g}"
            if row.predicted_s is None:
                lines.append(f"{place} | used in a fit | |")
                continue
            errors.append(row.error)
            lines.append(f"{place} | {row.predicted_s * 1e3:.3g} | {row.error:+.1%} |")
        lines.append("")
    return "\n".join(lines), errors


if __name__ == "__main__":
    main()
