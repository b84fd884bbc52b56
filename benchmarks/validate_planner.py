"""Writes docs/planner.md: what the planner was calibrated with, what it predicted, the error.

    python -m benchmarks.validate_planner [--families FILE.toml] [--page docs/planner.md]

Another file of published rows, of the same form, is tried with --families; its families have one
link with a fitted bandwidth unless `benchmarks.published_families` knows more of them. Which rows
are fitted, and which are implied by those, is marked in the file.
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks import one_weird_trick, shipped_devices, validate_emulated, validate_firecaffe
from benchmarks.paragraph import paragraph
from benchmarks.published_allreduce import Timed, read_allreduce
from benchmarks.published_allreduce import predict as predict_allreduce
from benchmarks.published_families import Outcome, predict, read_families

FAMILIES = Path(__file__).parent / "published" / "scaling.toml"
TRAININGS = Path(__file__).parent / "results" / "forecast.json"
ACCURATE = 0.1
COLUMNS = (
    "what",
    "tested",
    "fitted",
    "by hand",
    "predictions",
    "implied",
    "median error",
    "null",
    "largest",
    f"within {ACCURATE:.0%}",
)

HEAD = """# The planner, and its record

**What was tested.** `firecaffe plan`'s own function, on cluster files as they are, was held to
three things: to rates of single devices, where the shipped files miss (median {alone:.0%},
{outside} of {num_alone} outside their bands); to speedups of a network that was split over K20s,
on a file of data sheets (largest error {split:.0%}); and to steps of trainings on emulated hosts,
on files that `firecaffe check` had measured there. Trainings of split networks and of stages were
held to their forecasts, too, on pages of their own
([layouts](../benchmarks/results/forecast_layouts.md),
[a pipeline](../benchmarks/results/pipeline.md)). The other rows test parts: one exchange by
itself, or formulas beside the planner. **What was not:** a shipped cluster file on several devices;
any GPU, InfiniBand or real network; a training's hours, money, memory or failures.

This page says how a forecast is made, and how far off each part was wherever there is something to
hold it to. The record is written by a program:

    {command}

## How it works

- **Computing** (`planner/compute_time.py`): kernel by kernel, its operations at a share of the peak
  that depends on its class, arithmetic, library and smaller side; its bytes at a share of the
  memory rate; and an overhead that does not shrink with the batch. That overhead is why small
  batches are slow: it is Hockney's form of an efficiency that grows with the work. The shares are
  fitted to published rates; [how, and how far off](../benchmarks/results/device_rates.md). Where a
  cluster file has measured steps of the network (`firecaffe bench step`, `firecaffe check`), they
  scale it.
- **Exchange** (`planner/simulate.py`, `planner/round_prices.py`): the schedule that is executed, on
  ports. Up to 16 ranks every transfer is simulated, in the pieces and in the order in which ranks
  work through them; connections that share a port take turns there, as TCP's do. Beyond 16, like
  rounds are priced together, by the model of latency, bandwidth and additions, times what pieces
  saved among 16. Tests hold like rounds to the schedule's own, and both to the published formulas.
  Sums that ranks of one host make in shared memory are priced by what they read and write there, if
  a cluster file has the rate of that memory (`links.memory_bytes_per_s`, which `firecaffe check`
  measures); a file without it, as all shipped ones, has them as messages on its innermost link.
  Barriers cost nothing here.
- **A step** (`planner/step_cost.py`): buckets become ready as backward goes on, and as many travel
  at once as there are lanes (beyond 16 ranks, one after the other); what is still on its way at the
  end is exposed. Beside an exchange, computing takes longer by what `firecaffe check` has measured
  there (between hosts, beside a ring). Stragglers: the largest of P normal times. If each worker
  [updates a shard](training.md#an-update-in-shards) (`planner/update_price.py`, cut as a training
  cuts it), buckets go to their owners beside backward, the update is that of the largest shard, and
  the weights are gathered behind it; a bucket takes as long as its largest shard.
- **Memory, failures, accuracy, money** (`planner/memory.py`, `planner/forecast.py`): by volume, of
  the worker that holds most; by Daly's formula; by published points, and only between them; by the
  cluster's prices.
- **Bands**: compute times may be off by the device's `error`, exchange times by the link's, both to
  the same side.

What it leaves out: other users of a network, and a GPU's clock. That connections share a port by
turns is TCP's way; it was not held to InfiniBand, NVLink or NCCL.

## Summary

*Fitted*: constants that rows were used for. *By hand*: constants that somebody chose; what a source
prints of its hardware is neither. *Null*: the median error of the null model of the row's section,
on the same rows. *Implied*: predictions that follow from fitted rows whatever the model is; they
are counted among the others, and marked in [scaling.toml](../benchmarks/published/scaling.toml).

{columns}
"""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--families", type=Path, default=FAMILIES)
    parser.add_argument("--page", type=Path, default=None)
    options = parser.parse_args(argv)
    text = make_page(options.families)
    if options.page is None:
        print(text, end="")
    else:
        options.page.write_text(text, encoding="utf-8")


@dataclass(frozen=True)
class Record:
    """A row of the summary. null_errors: None where no null model stands beside."""

    what: str
    tested: str
    errors: Sequence[float]
    null_errors: Sequence[float] | None = None
    fitted: int = 0
    by_hand: int = 0
    implied: int = 0


def make_page(families: Path) -> str:
    alone, alone_errors, outside = shipped_devices.page(families)
    split, split_errors, split_null = one_weird_trick.page(families)
    titan, titan_errors, titan_null = validate_firecaffe.page(families)
    outcomes = [predict(family) for family in read_families(families)]
    reduced, timed, num_fitted, num_known = allreduce_section(families)
    emulated, emulated_errors = validate_emulated.page()
    trained, trained_errors = trainings_section()
    form = validate_emulated.BY_HAND
    open_rows = [row for each in outcomes for row in each.rows if row.predicted_per_s]
    rows = [
        Record("single devices, shipped files", "`firecaffe plan`", alone_errors),
        Record(
            "one weird trick on K20s, speedups",
            "`firecaffe plan --ways`",
            split_errors,
            split_null,
            1,
            len(one_weird_trick.BY_HAND),
        ),
        Record(
            "FireCaffe on Titan, hours",
            "the tree's formula",
            titan_errors,
            titan_null,
            1,
            implied=1,
        ),
        Record(
            "published throughputs",
            "formulas of rounds",
            [row.error for row in open_rows],
            [row.linear_error for row in open_rows],
            sum(len(_constants(each)) for each in outcomes),
            sum(len(each.set_by_hand) for each in outcomes),
            sum(row.is_implied for row in open_rows),
        ),
        Record(
            "published all_reduce times",
            "a formula, nothing of firecaffe",
            [row.error for row in timed],
            [row.scaled_error for row in timed],
            num_fitted,
            num_known,
            sum(row.is_implied for row in timed),
        ),
        *(
            Record(
                f"emulated, {'200 Mbit/s' if is_slow else '1 Gbit/s'}, exchanges",
                "the simulator",
                [
                    each.error
                    for each in emulated_errors
                    if (each.cell.megabits_per_s == 200) == is_slow
                ],
                [
                    each.rounds_error
                    for each in emulated_errors
                    if (each.cell.megabits_per_s == 200) == is_slow
                ],
                by_hand=form,
            )
            for is_slow in (True, False)
        ),
        Record(
            "emulated, 200 Mbit/s, steps of trainings",
            "`firecaffe plan` after `firecaffe check`",
            trained_errors,
            by_hand=form,
        ),
    ]
    head = HEAD.format(
        command="python -m benchmarks.validate_planner --page docs/planner.md",
        columns=f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}",
        alone=median(map(abs, alone_errors)),
        outside=outside,
        num_alone=len(alone_errors),
        split=max(map(abs, split_errors), default=0.0),
    )
    parts = [
        head + "\n".join(_summary(row) for row in rows if row.errors),
        alone,
        split,
        titan,
        families_section(outcomes),
        reduced,
        emulated,
        trained,
    ]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _constants(outcome: Outcome) -> list[float]:
    """What was fitted in a family, one by one; compute rates are listed by their number."""
    rates = int(outcome.fitted["compute rates, one for each network"])
    return [0.0] * rates + list(outcome.fitted.values())[1:]


def _summary(row: Record) -> str:
    sizes = [abs(error) for error in row.errors]
    within = sum(size <= ACCURATE for size in sizes)
    null = "-" if row.null_errors is None else f"{median(map(abs, row.null_errors)):.1%}"
    cells = [
        *(row.what, row.tested, row.fitted, row.by_hand, len(sizes), row.implied),
        *(f"{median(sizes):.1%}", null, f"{max(sizes):.1%}", f"{within} of {len(sizes)}"),
    ]
    return f"| {' | '.join(map(str, cells))} |"


def families_section(outcomes: Sequence[Outcome]) -> str:
    rows = [row for outcome in outcomes for row in outcome.rows if row.predicted_per_s]
    both = [row for row in rows if row.log_error is not None]
    lines = [
        "## Published throughputs",
        "",
        paragraph(
            f"""Tested: one formula for an exchange after computing. Not tested: `firecaffe plan`,
            for it prices with overlap, buckets and simulation, from a cluster file, and has no
            slow-down of computing outside the node, which one family here needs. Besides the fitted
            constants below, {sum(len(each.set_by_hand) for each in outcomes)} were set by hand
            (a latency and an overhead of calls for each family, bandwidths that a library reaches),
            and the exchange is a library's: the faster of ring and halving-doubling.
            `benchmarks/published_families.py` says how a row is fitted."""
        ),
        "",
        paragraph(
            f"""Null models. *Linear*, a network's row on the fewest devices times devices: median
            error {_median(row.linear_error for row in rows)} on the {len(rows)} rows, against the
            formula's {_median(row.error for row in rows)}. *t = a + b lg p* through a network's two
            rows on the fewest devices: {_median(row.log_error for row in both)} on the {len(both)}
            rows that it has, where the formula has {_median(row.error for row in both)} and linear
            {_median(row.linear_error for row in both)}. Most of these trainings scale almost
            linearly: that they are met says little."""
        ),
        "",
    ]
    for outcome in outcomes:
        fitted = "; ".join(f"{name}: {value:.3g}" for name, value in outcome.fitted.items())
        by_hand = "; ".join(f"{name}: {value:.3g}" for name, value in outcome.set_by_hand.items())
        lines += [
            f"### {outcome.name}",
            "",
            f"Source: {outcome.source}. Fitted: {fitted}. By hand: {by_hand}.",
            "",
            "| network | devices | published, a second | predicted | error | linear |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        for row in outcome.rows:
            name = row.net.split(":")[1]
            said = "used in a fit | | |"
            if row.predicted_per_s is not None:
                implied = " (implied)" if row.is_implied else ""
                said = f"{row.predicted_per_s:,.5g} | {row.error:+.1%}{implied} | "
                said += f"{row.linear_error:+.1%} |"
            lines.append(f"| {name} | {row.devices} | {row.per_s:,.5g} | {said}")
        lines.append("")
    return "\n".join(lines)


def _median(errors: Iterable[float | None]) -> str:
    return f"{median(abs(error) for error in errors if error is not None):.1%}"


def trainings_section() -> tuple[str, list[float]]:
    """The section of what `benchmarks.forecast_training` has measured."""
    rows = json.loads(TRAININGS.read_text("utf-8"))
    errors = [row["forecast_s"] / row["measured_s"] - 1 for row in rows]
    lines = [
        "### Real trainings at 200 Mbit/s",
        "",
        paragraph(
            """Tested: `firecaffe plan`'s function, before the first step, on the file that
            `firecaffe check` wrote on these hosts, against the median step; hardware and parts in
            [forecast.md](../benchmarks/results/forecast.md), by the planner and on the links of the
            commit that it names. Not tested: other rates, other machines, and trainings that were
            not in sight while the planner was made. How a step is composed, what `check` measures
            of it and what counts as a step's time were settled on such trainings."""
        ),
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


def allreduce_section(path: Path) -> tuple[str, list[Timed], int, int]:
    """The section; the rows that were not fitted; how many constants were, and were set by hand."""
    tables = [(family, *predict_allreduce(family)) for family in read_allreduce(path)]
    predicted = [row for _, rows, _ in tables for row in rows if row.predicted_s is not None]
    lines = [
        "## Published all_reduce times",
        "",
        paragraph(
            f"""Tested: a formula with constants of each library, 2 lg p · α + (2 (p - 1) / p · β +
            c(n)) n, which is no part of firecaffe: the planner has no c(n). Not tested: the
            planner. `benchmarks/published_allreduce.py` says how a row is fitted. The null model is
            a size's row of the fewest ranks, times 2 (p - 1) / p over its own: median error
            {_median(row.scaled_error for row in predicted)} on the {len(predicted)} rows, against
            the formula's {_median(row.error for row in predicted)}."""
        ),
        "",
    ]
    num_fitted = num_known = 0
    for family, rows, fitted in tables:
        num_fitted += sum(row.predicted_s is None for row in rows)
        num_known += "known_bytes_per_s" in family
        shown = "; ".join(f"{name}: {value:.3g}" for name, value in fitted.items())
        lines += [
            f"### {family['name']}",
            "",
            f"Source: {family['source']}. Fitted: {shown}.",
            "",
            "| MB | ranks | published, ms | predicted, ms | error | null |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        for row in rows:
            place = f"| {row.num_bytes / 1e6:.3g} | {row.ranks} | {row.taken_s * 1e3:.3g}"
            if row.predicted_s is None:
                lines.append(f"{place} | used in a fit | | |")
                continue
            implied = " (implied)" if row.is_implied else ""
            lines.append(
                f"{place} | {row.predicted_s * 1e3:.3g} | {row.error:+.1%}{implied} | "
                f"{row.scaled_error:+.1%} |"
            )
        lines.append("")
    return "\n".join(lines), predicted, num_fitted, num_known


if __name__ == "__main__":
    main()
