"""Published all_reduce times, predicted for the ranks and sizes that no fit has seen.

T(p, n) = 2 lg p · α + (2 (p - 1) / p · β + c(n)) n: the latency of a logarithmic exchange, the
bytes of an optimal one, and copies that do not shrink with p (a library that stages or registers
long messages pays for all n once). Used: for each size the row of the fewest ranks, which gives
c(n) or shows that there is none; the smallest size at the most ranks, for α; and the largest size
at the most ranks, for β, where the link's own rate is not known.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from math import log2
from pathlib import Path
from typing import Any

KNOWN_BYTES_PER_S = {"deepbench-knl-omnipath": 1.238e10}
"""OSU's osu_mbw_mr between a pair over Omni-Path 100."""


@dataclass(frozen=True)
class Timed:
    """One published time, in seconds."""

    family: str
    ranks: int
    num_bytes: int
    taken_s: float
    predicted_s: float | None = None

    @property
    def error(self) -> float:
        assert self.predicted_s is not None
        return self.predicted_s / self.taken_s - 1


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
    small, large = min(times), max(times)
    known = KNOWN_BYTES_PER_S.get(family["name"])
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

    used = {(few, n) for n in times} | {(many, small)} | (set() if known else {(many, large)})
    rows = [
        Timed(
            family["name"],
            p,
            n,
            times[n][p],
            None if (p, n) in used else predicted_s(p, n),
        )
        for n in times
        for p in ranks
    ]
    return rows, {
        "latency α, µs": alpha * 1e6,
        "bandwidth 1/β, GB/s": 1e-9 / beta,
        "copies c(n), one for each size": float(len(times)),
    }
