"""Published all_reduce times, by a formula that is no part of firecaffe.

T(p, n) = 2 lg p · α + (2 (p - 1) / p · β + c(n)) n: the latency of a logarithmic exchange, the
bytes of an optimal one, and copies that do not shrink with p (a library that stages or registers
long messages pays for all n once). The planner has no c(n) and prices with no such formula: this
says whether libraries' times have that form, and nothing of the planner.

Which rows are used is marked in the data file: for each size the row of the fewest ranks, which
gives c(n); the smallest size at the most ranks, for α; and the largest size at the most ranks, for
β, where the link's own rate is not known.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from math import log2
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Timed:
    """One published time, in seconds."""

    family: str
    ranks: int
    num_bytes: int
    taken_s: float
    predicted_s: float | None = None
    """None for one that was used in a fit."""
    is_implied: bool = False
    """Whether it lies between two fitted ones of its size."""
    scaled_s: float = 0.0
    """By the null model: the size's row of the fewest ranks, times 2 (p - 1) / p over its own."""

    @property
    def error(self) -> float:
        assert self.predicted_s is not None
        return self.predicted_s / self.taken_s - 1

    @property
    def scaled_error(self) -> float:
        return self.scaled_s / self.taken_s - 1


def read_allreduce(path: Path) -> list[dict[str, Any]]:
    families: list[dict[str, Any]] = tomllib.loads(path.read_text("utf-8")).get("allreduce", [])
    return families


def predict(family: Mapping[str, Any]) -> tuple[list[Timed], dict[str, float]]:
    """The rows with their predictions, and what was fitted."""
    ranks = family.get("nodes") or family["devices"]
    few, many = min(ranks), max(ranks)
    times = {
        4 * int(count): dict(zip(ranks, (each / 1e3 for each in row), strict=True))
        for count, row in family["ms"].items()
    }
    used, implied = (
        {(p, 4 * int(count)) for count, marked in family.get(mark, {}).items() for p in marked}
        for mark in ("fitted", "implied")
    )
    small, large = min(times), max(times)
    known = family.get("known_bytes_per_s")
    needed = {(few, n) for n in times} | {(many, small)} | (set() if known else {(many, large)})
    if used != needed:
        raise SystemExit(f"{family['name']}: as fitted should be marked {sorted(needed)}")
    steps = log2(many) - log2(few)
    share = {p: 2 * (p - 1) / p for p in ranks}
    beta = 1 / known if known else 0.0
    if not known:
        grown = times[large][many] - times[large][few]
        beta = grown / ((share[many] - share[few]) * large)
        beta = min(beta, times[large][few] / (share[few] * large))
    grown = times[small][many] - times[small][few]
    alpha = max(0.0, (grown - (share[many] - share[few]) * small * beta) / (2 * steps))

    def predicted_s(p: int, n: int) -> float:
        more = 2 * alpha * (log2(p) - log2(few)) + (share[p] - share[few]) * n * beta
        return float(times[n][few] + more)

    rows = [
        Timed(
            family["name"],
            p,
            n,
            times[n][p],
            None if (p, n) in used else predicted_s(p, n),
            (p, n) in implied,
            times[n][few] * share[p] / share[few],
        )
        for n in times
        for p in ranks
    ]
    fitted = {"latency α, µs": alpha * 1e6, "copies c(n), one for each size": float(len(times))}
    return rows, fitted if known else {**fitted, "bandwidth 1/β, GB/s": 1e-9 / beta}
