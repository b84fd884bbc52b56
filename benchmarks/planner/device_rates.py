"""Makes `planner/library_rates.toml` from published rates, and the record of how far off it is.

    python -m benchmarks.planner.device_rates            # the record
    python -m benchmarks.planner.device_rates --write   # writes the file of rates, without controls

Errors are of rows that were left out of the fit: all of their network (then other networks give the
device's scale), or all of their device's family (then the scale is 1, as of a device of which only
the data sheet is known). Beside them stand two controls, fitted to the same rows: one share of the
peak for all operations, and a roofline at one share of peak and memory rate, which was the
planner's form before. `fit = false` rows are in no fit.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.planner.device_fit import ByClass, ByFlops, ByRoofline, Problem, fit, left_out
from benchmarks.planner.device_rows import Array, read
from firecaffe.models import MODELS
from firecaffe.models.kernel import MULTIPLIES
from firecaffe.planner.cluster import load_cluster, shipped
from firecaffe.planner.library_rates import FILE

BAND = 0.8
"""The share of published rates that a band is to hold."""
DIGITS = 4
FORMS = {"classes": ByClass, "roofline (control)": ByRoofline, "operations (control)": ByFlops}
BY = {"network": "net", "family": "family"}


@dataclass(frozen=True)
class Record:
    """A model fitted to all rows, and errors of rows left out."""

    model: ByClass
    vector: Array
    errors: dict[str, Array]
    """By what is left out; signed, of time."""

    def of_rows(self, by: str, chosen: Array | None = None) -> Array:
        mask = self.model.problem.is_fitted
        mask = mask if chosen is None else mask & chosen
        return np.abs(self.errors[by][mask])


def record_of(kind: type[ByClass], problem: Problem) -> Record:
    model = kind(problem)
    vector = fit(model, problem.is_fitted)
    errors = {name: left_out(model, vector, column) for name, column in BY.items()}
    return Record(model, vector, errors)


def fitted_only(problem: Problem) -> tuple[ByClass, Array]:
    model = ByClass(problem)
    return model, fit(model, problem.is_fitted)


def rates_text(model: ByClass, vector: Array, bands: dict[str, float]) -> str:
    """The file of rates. bands: by what was left out."""
    problem, found = model.problem, model.values(vector)
    devices = len(problem.devices)
    lines = [
        "# Made by `python -m benchmarks.planner.device_rates --write`; not edited by hand.",
        f"# Fitted to {int(problem.is_fitted.sum())} published rates: {len(vector)} numbers, "
        f"{devices} of them scales of devices.",
        f"# Set by hand: {len(model.start) - devices - len(problem.groups) * len(MULTIPLIES)} "
        "starts, 7 spreads and the spread of rows (benchmarks/planner/device_fit.py).",
        "# A class without rows of its arithmetic and library has what all libraries have.",
        f"overhead_s = {_number(found.overhead_s)}",
        "",
        "[band]",
        f"network_out = {_number(bands['network'])}",
        f"family_out = {_number(bands['family'])}",
        "",
        "[reread]",
        f"float32 = {_number(found.reread[0])}",
        f"tensor = {_number(found.reread[1])}",
        "",
        "[memory]",
        f"matrix = {_number(found.matrix_memory)}",
        f"other = {_number(found.memory)}",
        f"transposes = {_number(found.transposes)}",
        "",
        "[scale]",
        *(
            f'"{problem.sheets[device].name}" = {_number(scale)}'
            for device, scale in zip(problem.devices, found.scales, strict=True)
            if scale != 1
        ),
    ]
    lines += ["", "[family_scale]", *_family_scales(problem, found.scales)]
    for (arithmetic, library), shares in zip(problem.groups, found.shares, strict=True):
        lines += ["", f'[share.{arithmetic}."{library}"]']
        lines += [
            f"{kind} = {_number(share)}" for kind, share in zip(MULTIPLIES, shares, strict=True)
        ]
    lines += _known(problem)
    return "\n".join(lines) + "\n"


def _family_scales(problem: Problem, scales: Array) -> list[str]:
    """The geometric mean of a family's scales, for its devices that have no rows of their own."""
    families = np.array([problem.sheets[device].family for device in problem.devices])
    has_rows = scales != 1
    lines = []
    for family in np.unique(families):
        own = scales[(families == family) & has_rows]
        lines.append(f"{family} = {_number(float(np.exp(np.log(own).mean())))}")
    return lines


def _known(problem: Problem) -> list[str]:
    """Rates of our networks that a plan compares with its own.

    They are of devices of shipped clusters, and of others with the library that is planned with.
    """
    names = {load_cluster(name).device.name for name in shipped()}
    lines = []
    for row in problem.rows:
        sheet = problem.sheets[row.device]
        is_planned = sheet.name in names or row.library == sheet.library
        if is_planned and row.net in MODELS and (row.is_fitted or row.source == "firecaffe"):
            lines += [
                "",
                "[[known]]",
                f'device = "{sheet.name}"',
                f'model = "{row.net}"',
                f'precision = "{row.precision}"',
                f"channels_last = {str(row.channels_last).lower()}",
                f"batch = {row.batch}",
                f"images_per_s = {_number(row.batch / row.seconds)}",
                f'source = "{row.source}"',
            ]
    return lines


def _number(value: float) -> str:
    return f"{value:.{DIGITS}g}"


def words(errors: Array) -> str:
    if not len(errors):
        return "none"
    middle, most = np.median(errors), np.quantile(errors, 0.9)
    return f"{len(errors)}, {middle:.1%}, {most:.1%}"


def table(records: dict[str, Record]) -> str:
    """Markdown: for each family n, median and ninth decile of what is left out."""
    own = next(iter(records.values()))
    families = own.model.problem.column("family")
    heads = [f"{model}: {by} left out" for by in BY for model in records]
    lines = [
        "| family | " + " | ".join(heads) + " |",
        "| --- |" + " --- |" * len(heads),
    ]
    for family in ("all", *np.unique(families)):
        chosen = None if family == "all" else families == family
        cells = [words(record.of_rows(by, chosen)) for by in BY for record in records.values()]
        lines.append(f"| {family} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def covered(record: Record, by: str) -> float:
    """The share of rows in a band that was made without the rows of their own family."""
    problem = record.model.problem
    mask = problem.is_fitted
    families, over = problem.column("family")[mask], record.errors[by][mask] + 1
    needed, inside = np.abs(1 / over - 1), 0
    for family in np.unique(families):
        own = families == family
        inside += int((needed[own] <= np.quantile(needed[~own], BAND)).sum())
    return inside / len(over)


def band_of(record: Record, by: str) -> float:
    """The least band around forecasts that holds BAND of the rows that were left out."""
    over = record.errors[by][record.model.problem.is_fitted] + 1
    needed = np.abs(1 / over - 1)
    return float(np.quantile(needed, BAND))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the file of rates; no controls")
    options = parser.parse_args()
    problem = Problem(*read())
    forms = {"classes": ByClass} if options.write else FORMS
    records = {name: record_of(kind, problem) for name, kind in forms.items()}
    own = records["classes"]
    print("n, median and ninth decile of the error of a step's time:\n")
    print(table(records))
    bands = {by: band_of(own, by) for by in BY}
    for by, band in bands.items():
        print(f"\n{by} left out: a band of {band:.0%} is to hold {BAND:.0%}; made without a row's")
        print(f"own family, bands hold {covered(own, by):.0%}")
    for name, record in records.items():
        print(f"{name}: {len(record.vector)} numbers fitted")
    if options.write:
        Path(FILE).write_text(rates_text(own.model, own.vector, bands), "utf-8")
        print(f"wrote {FILE.name}: {len(problem.groups)} tables")


if __name__ == "__main__":
    main()
