"""The law of epochs against batch, held to MLPerf's reference convergence points.

    python -m benchmarks.planner.epochs_law --page benchmarks/results/epochs_law.md   # seconds

Three tasks: a batch between others; batches up to twice the largest given; down to half of the
smallest. The form of the deviations (`planner.epochs_law.FORM`) is the one of a grid with the best
mean log density of left-out rows, each network counted equally. A network's own errors are by the
form that the other networks choose. A power p of the batch, E_min (1 + (B / B_crit)^p), is the same
law of B^p, and so needs no code in the product.
"""

import argparse
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import exp, log
from pathlib import Path

import numpy as np
from scipy.stats import t as student

from firecaffe.planner.epochs_law import BAND, FORM, REACH, BatchPoint, Deviations, EpochsLaw

DATA = Path(__file__).parents[1] / "published" / "epochs.toml"
POWERS, LENGTHS = (1.0, 1.25, 1.5), (0.0, 0.5, 1.0, 2.0)
SCATTERS, PRIORS = (0.03, 0.05, 0.1), (1.0, 2.0, 4.0)
Structure = tuple[float, float]
"""A power and a length."""


@dataclass(frozen=True)
class Case:
    task: str
    network: str
    given: tuple[BatchPoint, ...]
    asked: BatchPoint


TASKS = {
    "between": "a batch between others",
    "above": "up to twice the largest",
    "below": "down to half the smallest",
}
ASKED = {"between": 0.05, "above": 0.15}
"""Median errors that are asked for."""


@dataclass(frozen=True)
class Outcome:
    case: Case
    error: float
    """Relative, signed."""
    density: float
    """Log density of the row, in ln epochs."""
    is_held: bool
    """Whether the band of 80 % holds the row."""


def read_tables() -> dict[str, list[BatchPoint]]:
    tables = tomllib.loads(DATA.read_text("utf-8"))["table"]
    return {
        table["name"]: [BatchPoint(r["batch"], r["mean"], r["sd"], r["n"]) for r in table["rows"]]
        for table in tables
    }


def cases_of(tables: Mapping[str, Sequence[BatchPoint]]) -> Iterator[Case]:
    """Yield all cases. Two tables of one network, NAME and NAME-vN, are one network."""
    for name, rows in tables.items():
        network = name.split("-v")[0]
        inner = range(1, len(rows) - 1)
        for k in inner:
            yield Case("between", network, (*rows[:k], *rows[k + 1 :]), rows[k])
        for k in range(2, len(rows)):
            for row in rows[k:]:
                if row.batch <= REACH * rows[k - 1].batch:
                    yield Case("above", network, tuple(rows[:k]), row)
        for k in inner:
            for row in rows[:k]:
                if row.batch * REACH >= rows[k].batch:
                    yield Case("below", network, tuple(rows[k:]), row)


def outcomes(cases: Sequence[Case], form: Deviations, power: float) -> list[Outcome]:
    laws: dict[tuple[BatchPoint, ...], EpochsLaw] = {}
    form = Deviations(form.scatter, form.length * power, form.prior)

    def law_of(given: tuple[BatchPoint, ...]) -> EpochsLaw:
        points = tuple(BatchPoint(p.batch**power, p.epochs, p.spread, p.runs) for p in given)
        return laws.setdefault(given, EpochsLaw("", points, "", form))

    done = []
    for case in cases:
        law = laws.get(case.given) or law_of(case.given)
        middle, width, freedom = law.predicted(case.asked.batch**power)
        off = log(case.asked.epochs / middle) / width
        density = float(student.logpdf(off, freedom)) - log(width)
        is_held = abs(off) <= float(student.ppf((1 + BAND) / 2, freedom))
        done.append(Outcome(case, middle / case.asked.epochs - 1, density, is_held))
    return done


Grid = dict[tuple[float, Deviations], list[Outcome]]
"""The outcomes of all cases, by power and form."""


def grid_of(cases: Sequence[Case]) -> Grid:
    forms = [Deviations(*values) for values in product(SCATTERS, LENGTHS, PRIORS)]
    return {(p, form): outcomes(cases, form, p) for p in POWERS for form in forms}


def best(grid: Grid, without: str = "") -> tuple[float, Deviations]:
    """The power and form of the best mean log density, each network counted equally."""

    def score(key: tuple[float, Deviations]) -> float:
        by_network: dict[str, list[float]] = {}
        for outcome in grid[key]:
            by_network.setdefault(outcome.case.network, []).append(outcome.density)
        return float(np.mean([np.mean(v) for name, v in by_network.items() if name != without]))

    return max(grid, key=score)


def left_out(grid: Grid) -> list[Outcome]:
    """The outcomes of each network by the form that the others choose."""
    networks = dict.fromkeys(o.case.network for o in next(iter(grid.values())))
    chosen = {network: best(grid, network) for network in networks}
    return [o for network, key in chosen.items() for o in grid[key] if o.case.network == network]


def neighbours(case: Case) -> tuple[BatchPoint, BatchPoint]:
    """The two given points around the batch asked for, or the two nearest ones beyond an end."""
    below = sum(point.batch <= case.asked.batch for point in case.given)
    first = min(max(below - 1, 0), len(case.given) - 2)
    return case.given[first], case.given[first + 1]


def through_two(
    x: Callable[[float], float], y: Callable[[float], float]
) -> Callable[[Case], float]:
    """The line through two neighbours in x(batch) and y(epochs); the value is y."""

    def value(case: Case) -> float:
        a, b = neighbours(case)
        share = (x(case.asked.batch) - x(a.batch)) / (x(b.batch) - x(a.batch))
        return y(a.epochs) + share * (y(b.epochs) - y(a.epochs))

    return value


def constant(case: Case) -> float:
    return min(case.given, key=lambda point: abs(log(point.batch / case.asked.batch))).epochs


LINE = through_two(float, float)
IN_LN_B = through_two(log, float)
LOG_LOG = through_two(log, log)
BASELINES: dict[str, Callable[[Case], float]] = {
    "the nearest batch's epochs": constant,
    "a line through two neighbours": LINE,
    "the same in ln B": IN_LN_B,
    "the same in ln B and ln E": lambda case: exp(LOG_LOG(case)),
}


def errors_of(done: Sequence[Outcome], task: str) -> list[float]:
    return sorted(abs(outcome.error) for outcome in done if outcome.case.task == task)


def cells(errors: Sequence[float]) -> str:
    return f"{np.median(errors):.1%} | {np.quantile(errors, 0.9):.1%} | {max(errors):.0%}"


def coverage(done: Sequence[Outcome], task: str) -> str:
    held = [outcome.is_held for outcome in done if outcome.case.task == task]
    return f"{sum(held)} of {len(held)}"


PAGE = """# Epochs against batch

    python -m benchmarks.planner.epochs_law --page benchmarks/results/epochs_law.md

Tested: `planner.epochs_law`, the law of `firecaffe plan`, on MLPerf's reference convergence points
([rows](../published/epochs.toml)): {networks} networks, {rows} rows. ResNet-50 has two tables,
which share {shared} rows. Each row has its own hyperparameters. BERT's rows are samples, not
epochs. Errors are of epochs. Bands are of {band:.0%}, for one run.

## Left-out rows

For each network the other networks choose the form. *Asked* is the median error that was asked for.
Cases overlap: a row is asked for from several sets of others, so n counts no independent trials.

| batch asked for | n | median | nine of ten within | largest | in the band | asked |
|---|---|---|---|---|---|---|
{tasks}

{two}

| without the law | {quantiles} |
|---{rule}|
{baselines}

{verdict}

## By network

| network | {held} |
|---{rule}|
{by_network}

The law through all rows of a table. *Off*: the median error of the line alone. *Band*: its upper
end, at a batch in the middle and at twice the largest, the end of the law's range. Where recipes
differ by row, as CosmoFlow's, the line misses its own rows, and this widens the band.

| table | rows | E_min | B_crit | off | band, middle | band, twice |
|---|---|---|---|---|---|---|
{laws}

## Forms that were tried

E = E_min (1 + (B / B_crit)^p). *Length*: the difference of ln B over which deviations from the
line are alike (0: independent). Scatters {scatters} and priors {priors} were tried with each,
{tried} forms in all. For each network the others chose.
Tried by hand before, on the same rows, and not better in both tasks: the line scaled to the largest
batch given (5.0% between, 7.8% above), and weights that fall with the distance to the batch asked
for (3.6% to 4.4%, 7.5% to 10.7%).

| p | length | {held} |
|---|---{rule}|
{forms}

All networks together choose p = {power:g}, {form}.
The product has p = 1, {product}.
No network is left to judge that choice; the errors above are of the choices without them.
"""


def verdict(done: Sequence[Outcome]) -> str:
    said = []
    for task, asked in ASKED.items():
        middle = np.median(errors_of(done, task))
        word = "met" if middle <= asked else "**missed**"
        said.append(f"The median asked for {TASKS[task]} is {word} ({middle:.1%}, {asked:.0%}).")
    for task, what in TASKS.items():
        cases = [outcome.case for outcome in done if outcome.case.task == task]
        middle = np.median(errors_of(done, task))
        for name, of in BASELINES.items():
            plain = np.median(plain_errors(of, cases))
            if plain < middle:
                said.append(f"For {what}, {name} is **better** ({plain:.1%}).")
        held = np.mean([outcome.is_held for outcome in done if outcome.case.task == task])
        if not 0.7 <= held <= 0.9:
            said.append(f"**The band misses its aim** (70 to 90%) for {what}: {held:.0%}.")
    by_network: dict[str, list[bool]] = {}
    for outcome in done:
        by_network.setdefault(outcome.case.network, []).append(outcome.is_held)
    for network, held_rows in by_network.items():
        if np.mean(held_rows) < 0.7:
            said.append(
                f"**The band is too narrow** for {network}: it holds {sum(held_rows)} of "
                f"{len(held_rows)}."
            )
    worst = max(done, key=lambda outcome: abs(outcome.error))
    said.append(
        f"The worst row is {worst.case.network}, batch {worst.case.asked.batch}: "
        f"{worst.error:+.0%} from {len(worst.case.given)} others, "
        f"{'inside' if worst.is_held else '**outside**'} its band."
    )
    return "\n".join(said)


def plain_errors(of: Callable[[Case], float], cases: Sequence[Case]) -> list[float]:
    return [abs(of(case) / case.asked.epochs - 1) for case in cases]


def heads(*words: str) -> str:
    return " | ".join(f"{task}: {word}" for task in TASKS for word in words)


def row_of(done: Sequence[Outcome]) -> str:
    parts = []
    for task in TASKS:
        errors = errors_of(done, task)
        parts += [f"{np.median(errors):.1%}", coverage(done, task)] if errors else ["-", "-"]
    return " | ".join(parts)


def of_tasks(done: Sequence[Outcome]) -> str:
    return "\n".join(
        f"| {what} | {len(errors_of(done, task))} | {cells(errors_of(done, task))} | "
        f"{coverage(done, task)} | {f'{ASKED[task]:.0%}' if task in ASKED else '-'} |"
        for task, what in TASKS.items()
    )


def of_two(done: Sequence[Outcome]) -> str:
    """Say how rows fare that are predicted from two others, as most users will have."""
    two = [o for o in done if len(o.case.given) == 2 and o.case.task == "above"]
    held = sum(outcome.is_held for outcome in two)
    middle = np.median(errors_of(two, "above"))
    return (
        f"From two batches only, rows up to twice the larger are off by {middle:.1%} in "
        f"the median (n {len(two)}; {held} in the band)."
    )


def of_baselines(cases: Sequence[Case]) -> str:
    rows = []
    for name, of in BASELINES.items():
        by_task = [plain_errors(of, [c for c in cases if c.task == task]) for task in TASKS]
        said = (f"{np.median(e):.1%} | {np.quantile(e, 0.9):.1%}" for e in by_task)
        rows.append(f"| {name} | {' | '.join(said)} |")
    return "\n".join(rows)


def of_forms(grid: Grid) -> str:
    structures: dict[Structure, Grid] = {}
    for (power, form), results in grid.items():
        structures.setdefault((power, form.length), {})[power, form] = results
    return "\n".join(
        f"| {power:g} | {length:g} | {row_of(left_out(part))} |"
        for (power, length), part in sorted(structures.items())
    )


def of_laws(tables: Mapping[str, Sequence[BatchPoint]]) -> str:
    """What the product says of each table, fitted whole."""
    rows = []
    for name, points in tables.items():
        law = EpochsLaw(name, tuple(points), "")
        missed = sorted(
            abs(law.e_min * (1 + p.batch / law.b_crit) / p.epochs - 1) if law.b_crit else 1.0
            for p in points
        )
        widths = []
        for batch in (points[len(points) // 2].batch, law.range[1]):
            _, middle, high = law.band_at(batch)
            widths.append(f"{high / middle - 1:+.0%}")
        rows.append(
            f"| {name} | {len(points)} | {law.e_min:,.4g} | {law.b_crit:,.0f} | "
            f"{np.median(missed):.1%} | {' | '.join(widths)} |"
        )
    return "\n".join(rows)


def page() -> str:
    tables = read_tables()
    cases = list(cases_of(tables))
    grid = grid_of(cases)
    done = left_out(grid)
    power, form = best(grid)
    networks = dict.fromkeys(case.network for case in cases)
    distinct = {(name.split("-v")[0], row) for name, rows in tables.items() for row in rows}
    return PAGE.format(
        networks=len(networks),
        rows=len(distinct),
        shared=sum(map(len, tables.values())) - len(distinct),
        band=BAND,
        tasks=of_tasks(done),
        two=of_two(done),
        quantiles=heads("median", "90%"),
        held=heads("median", "in the band"),
        rule="|---" * 2 * len(TASKS),
        baselines=of_baselines(cases),
        verdict=verdict(done),
        by_network="\n".join(
            f"| {network} | {row_of([o for o in done if o.case.network == network])} |"
            for network in networks
        ),
        laws=of_laws(tables),
        scatters=", ".join(f"{scatter:g}" for scatter in SCATTERS),
        priors=", ".join(f"{prior:g}" for prior in PRIORS),
        tried=len(grid),
        forms=of_forms(grid),
        power=power,
        form=_form(form),
        product=_form(FORM),
    )


def _form(form: Deviations) -> str:
    return f"scatter {form.scatter:g}, length {form.length:g}, prior {form.prior:g}"


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--page", type=Path, help="where the result page goes")
    given = parser.parse_args()
    text = page()
    print(text)
    if given.page:
        given.page.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
