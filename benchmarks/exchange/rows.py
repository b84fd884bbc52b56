"""The raw lines of `benchmarks.exchange.scaling` as rows: one for each exchange in each place."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log2
from pathlib import Path
from typing import Any

from scipy.stats import linregress

from benchmarks.exchange.plan import Cell, bound_s, formula_s
from firecaffe.exchange import EXCHANGES, NATIVE


@dataclass(frozen=True)
class Row:
    """One cell as it was measured last, with the line that it is from."""

    cell: Cell
    line: dict[str, Any]
    not_run: str = ""

    @property
    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = self.line["results"][self.cell.algorithm]
        return found

    @property
    def samples_s(self) -> list[float]:
        found: list[float] = self.result["samples_s"]
        return found

    @property
    def time_s(self) -> float:
        return statistics.median(self.samples_s)

    @property
    def ratio_to_bound(self) -> float:
        return self.time_s / bound_s(self.cell)

    def ratio_to_formula(self, *, in_pieces: bool) -> float | None:
        """None where there is no schedule."""
        if self.cell.algorithm == NATIVE:
            return None
        return self.time_s / formula_s(self.cell, self.line["alpha_s"], in_pieces=in_pieces)

    @property
    def ratio_to_native(self) -> float | None:
        """Median over the repetitions that both had; None where native had no turn in that run."""
        control = self.line["results"].get(NATIVE)
        if control is None:
            return None
        of_native = dict(zip(control["repetitions"], control["samples_s"], strict=True))
        pairs = zip(self.result["repetitions"], self.samples_s, strict=True)
        ratios = [taken / of_native[number] for number, taken in pairs if number in of_native]
        return statistics.median(ratios) if ratios else None


@dataclass(frozen=True)
class Fit:
    """time = constant_s + slope_s · x, by least squares."""

    constant_s: float
    slope_s: float
    r_squared: float
    points: int


def read_rows(raw: Path) -> list[Row]:
    """In order of rate, size, hosts and exchange. A later line replaces what earlier ones say."""
    latest: dict[Cell, Row] = {}
    for text in raw.read_text().splitlines():
        line = json.loads(text)
        place = line["hosts"], line["rate_bits_per_s"], line["size_bytes"]
        for name in line["results"]:
            latest[Cell(*place, name)] = Row(Cell(*place, name), line)
        for name, reason in line["not_run"].items():
            latest[Cell(*place, name)] = Row(Cell(*place, name), line, reason)
    return sorted(latest.values(), key=lambda row: _place(row.cell))


def fits(rows: Sequence[Row]) -> dict[str, Fit]:
    """The times of one exchange against p - 1 and ceil(lg p); empty for fewer than 3 points."""
    timed = [row for row in rows if not row.not_run]
    if len(timed) < 3:
        return {}
    found = {}
    for words, xs in (
        ("p - 1", [row.cell.hosts - 1 for row in timed]),
        ("⌈lg p⌉", [ceil(log2(row.cell.hosts)) for row in timed]),
    ):
        line = linregress(xs, [row.time_s for row in timed])
        found[words] = Fit(
            float(line.intercept), float(line.slope), float(line.rvalue) ** 2, len(timed)
        )
    return found


def _place(cell: Cell) -> tuple[int, int, int, int]:
    return cell.rate_bits_per_s, cell.size_bytes, cell.hosts, EXCHANGES.index(cell.algorithm)
