"""Writes docs/explanation/planner.md: how the planner was calibrated, what it predicted, errors.

    python -m benchmarks.planner.validate_planner --page docs/explanation/planner.md

Published throughputs are judged by `published_scaling`; which rows of the other tables
are fitted, and which are implied by those, is marked in their file.
"""

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.kit.paragraph import paragraph
from benchmarks.planner import (
    one_weird_trick,
    shipped_devices,
    validate_emulated,
    validate_firecaffe,
)
from benchmarks.planner.forecast_emulated import by_rate, errors_of
from benchmarks.planner.published_allreduce import Timed, read_allreduce
from benchmarks.planner.published_allreduce import predict as predict_allreduce
from benchmarks.planner.published_scaling import UNSEEN, families, judged, summary_table

PUBLISHED = Path(__file__).parents[1] / "published" / "scaling.toml"
TRAININGS = Path(__file__).parents[1] / "results" / "forecast.json"
ACCURATE = 0.1
NUM_USUAL = 10
"""Numbers of `planner.offers.USUAL` that are fitted."""
COUNTED = ("copies c(n), one for each size",)
"""Of what was fitted: how many, not their values."""
COLUMNS = (
    "what",
    "tested",
    "fitted",
    "chosen",
    "implied",
    "median error",
    "null",
    "largest",
    f"within {ACCURATE:.0%}",
)

HEAD = """# The planner, and how far off it is

How `firecaffe plan` forecasts a step's time, and how far off it was.
`benchmarks/planner/validate_planner.py` writes this page.

## Summary

**Single devices by data sheet**: the median error is {alone:.0%}, and {outside} of {num_alone}
rates lie outside the band. On emulated hosts that `firecaffe check` measured, steps are a median
of {trained:.1%} off.
**Not tested:** any GPU,
InfiniBand or real network of our own; hours, money and failures of a training.

*Fitted*: constants adjusted to rows. *Chosen*: those that we set. *Implied*, or *i*: what follows
from fitted rows whatever the model is. *Null*: the median error of the section's null model on the
same rows.

{table}

## How a forecast is made

- **Computing.** Each kernel takes its operations at a share of the peak and its bytes at a share of
  the memory rate. It also has an overhead that does not shrink with the batch (Hockney's form). The
  shares depend on class, size and library. They are
  [fitted to published rates](../../benchmarks/results/device_rates.md). Steps that `check` or
  `bench step` measured scale the sum.
- **Exchange.** Up to 16 ranks each transfer of the schedule is simulated. Connections that share a
  port take turns, as TCP's do. Beyond 16 ranks a formula of latency, bandwidth and additions prices
  each round; the simulation of 16 ranks, with messages as long, corrects it.
- **Shared memory.** Sums within a host are priced by bytes if `check` measured
  `links.memory_bytes_per_s`; else as messages on the innermost link.
- **A step.** Buckets become ready as backward goes on. What travels after backward is exposed.
  Computing during an exchange is slower, by what `check` measured. If workers vary, a step waits
  for the largest of P normal times; rows of workers do at each exchange of activations.
- **Servers.** Transfers share ports equally; updates take the processor.
- **Others.** Memory is counted for the fullest worker. Failures follow Daly's formula. Epochs
  follow [a law](../../benchmarks/results/epochs_law.md) of published points or of `--epochs`.
- **Bands.** Compute times may be off by the device's `error`, exchange times by the link's, all to
  the same side.

Left out: other users of the network, a GPU's clock, checkpoints, and decoding unless measured.
"""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--page", type=Path, default=None)
    options = parser.parse_args(argv)
    text = make_page(PUBLISHED)
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


def make_page(published: Path) -> str:
    alone, alone_errors, outside = shipped_devices.page()
    fitted = shipped_devices.num_fitted()
    split, split_errors, split_null = one_weird_trick.page(published)
    titan, titan_errors, titan_null = validate_firecaffe.page(published)
    reduced, timed, num_fitted, num_known = allreduce_section(published)
    emulated, emulated_errors = validate_emulated.page()
    trainings = json.loads(TRAININGS.read_text("utf-8"))
    form = validate_emulated.BY_HAND
    rows = [
        Record("single devices, data sheets", "`plan`", alone_errors, None, fitted),
        Record(
            "one weird trick, speedups",
            "`plan --ways`",
            split_errors,
            split_null,
            1,
            len(one_weird_trick.BY_HAND),
        ),
        Record(
            "FireCaffe on Titan, hours", "`plan --runs`", titan_errors, titan_null, NUM_USUAL, 1
        ),
        *(
            Record(
                said,
                "`plan --runs`",
                [row.error for row in some],
                [row.linear_error for row in some],
                constants,
                1,
            )
            for said, some, constants in (
                ("published throughputs, one row known", judged(1), NUM_USUAL),
                ("published throughputs, two rows known", judged(2), NUM_USUAL),
                ("the same, unseen, one row known", judged(1, UNSEEN), 0),
            )
        ),
        Record(
            "published all_reduce times",
            "a formula",
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
        *(
            Record(
                f"emulated trainings, {said}",
                "`plan` after `check`",
                [row[word] / row["measured_s"] - 1 for row in trainings],
                by_hand=form,
            )
            for said, word in (("first forecast", "first_s"), ("after 20 steps", "forecast_s"))
        ),
    ]
    head = HEAD.format(
        table="\n".join(
            [
                f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}",
                *(_summary(row) for row in rows if row.errors),
            ]
        ),
        alone=median(map(abs, alone_errors)),
        outside=outside,
        num_alone=len(alone_errors),
        trained=median(errors_of(trainings)),
    )
    parts = [
        head,
        alone,
        split,
        titan,
        families_section(),
        reduced,
        emulated,
        trainings_section(trainings),
    ]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _summary(row: Record) -> str:
    sizes = [abs(error) for error in row.errors]
    within = sum(size <= ACCURATE for size in sizes)
    null = "-" if row.null_errors is None else f"{median(map(abs, row.null_errors)):.1%}"
    cells = [
        *(row.what, row.tested, row.fitted, row.by_hand, row.implied),
        *(f"{median(sizes):.1%}", null, f"{max(sizes):.1%}", f"{within} of {len(sizes)}"),
    ]
    return f"| {' | '.join(map(str, cells))} |"


def families_section() -> str:
    """The section of published throughputs; its rows are in a record of their own."""
    lines = [
        "## Published throughputs",
        "",
        paragraph(
            f"""Tested: the forecast of `plan --runs FILE`. {len(families())} files hold rows; the
            first one or two of each training are known, the others forecast ([row by
            row](../../benchmarks/results/published_scaling.md)). *A step*: the first row is a
            measured step, and nothing else is corrected, as by `plan --cluster`. *linear*: the
            first row times the devices. *a + b lg p*: the step's time through the first two
            rows. Cells are the median error and the ninth decile, in per cent."""
        ),
        "",
        *summary_table(),
        "",
        "![Published samples a second against forecasts, with bands](../pictures/forecasts.svg)",
        "",
        paragraph(
            f"""Bands should hold 70 to 90 % of the rows. Ten usual values are fitted to all rows
            but FireCaffe's: of exchanges, of their effect on computing, of scatter. The form was
            chosen on them; the record leaves each source out.
            *Unseen*: {len(families(UNSEEN))} files, collected later, in no fit. Their first
            forecast, before a look at errors, was off by 4.4 and 31.0; then
            `micro_batch` and the links' own errors came, and 16 rows went: no steady rates, or an
            undescribed network. **It fails** on hosts without GPUs, whose cores are unknown;
            on libraries that do not overlap, until a second row shows it; by TCP on Azure (10 to
            80 % too fast); on Lambda's BERT (up to 124 %). Bands of two known rows are too narrow
            for unseen networks."""
        ),
    ]
    return "\n".join(lines)


def _family(name: str, source: str, fitted: Mapping[str, float]) -> str:
    """A cell: whose figures these are, and what was fitted to them."""
    values = [f"{what}: {value:.3g}" for what, value in fitted.items() if what not in COUNTED]
    return "; ".join([f"{name}: {source}", *values])


def _error(error: float, is_implied: bool) -> str:
    """Of a cell that lists several."""
    return f"{100 * error:+.1f}{'i' if is_implied else ''}"


def _median(errors: Iterable[float | None]) -> str:
    return f"{median(abs(error) for error in errors if error is not None):.1%}"


def trainings_section(rows: Sequence[dict[str, Any]]) -> str:
    """The section of what `benchmarks.planner.forecast_emulated` has measured."""
    lines = [
        "## Trainings on emulated hosts",
        "",
        paragraph(
            """Tested: forecasts from `firecaffe check`'s file, of LeNet in 14 settings
            ([record](../../benchmarks/results/forecast.md)). The second forecast is from after 20
            steps, with computing measured. **It fails** if slow processors compute little: their
            time for messages is left out. Such trainings decided what is priced."""
        ),
        "",
        "| link | n | first, median | largest | second, median | largest | in band |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += by_rate(rows)
    return "\n".join(lines)


def allreduce_section(path: Path) -> tuple[str, list[Timed], int, int]:
    """The section; the rows that were not fitted; how many constants were, and were set by hand."""
    tables = [(family, *predict_allreduce(family)) for family in read_allreduce(path)]
    predicted = [row for _, rows, _ in tables for row in rows if row.predicted_s is not None]
    lines = [
        "## Published all_reduce times",
        "",
        paragraph(
            """Tested: a formula with constants of each library, 2 lg p · α + (2 (p - 1) / p · β +
            c(n)) n. It is no part of firecaffe. c(n), copies of long messages, is a size's first
            fit. The null model scales a size's first row by 2 (p - 1) / p."""
        ),
        "",
        "| family: source; other fits | MB | ranks | n | median error | largest | null, median |",
        "|---|---|---|---|---|---|---|",
    ]
    num_fitted = num_known = 0
    for family, rows, fitted in tables:
        num_fitted += sum(row.predicted_s is None for row in rows)
        num_known += "known_bytes_per_s" in family
        own = [row for row in rows if row.predicted_s is not None]
        worst = max(own, key=lambda row: abs(row.error))
        cells = [
            _family(family["name"], family["source"], fitted),
            ", ".join(f"{size / 1e6:.3g}" for size in dict.fromkeys(row.num_bytes for row in rows)),
            ", ".join(str(ranks) for ranks in dict.fromkeys(row.ranks for row in rows)),
            str(len(own)),
            _median(row.error for row in own),
            f"{worst.error:+.1%}, {worst.num_bytes / 1e6:.3g} MB on {worst.ranks}",
            _median(row.scaled_error for row in own),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines), predicted, num_fitted, num_known


if __name__ == "__main__":
    main()
