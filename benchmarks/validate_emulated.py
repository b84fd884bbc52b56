"""The planner against our own measurements on emulated clusters: benchmarks/results/exchange.md.

A link of the emulation has one free figure of its own, the latency; its rate is the token bucket's
times TCP's payload share. The switch's congestion is fitted to the parameter server on 8 hosts,
and each exchange's efficiency to its 7 MB on 8 hosts; all other cells of 200 Mbit/s, and all of
1 Gbit/s, are predicted.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from firecaffe.exchange import ALGORITHMS
from firecaffe.plan.cluster import Link
from firecaffe.plan.network import Network
from firecaffe.plan.price import Prices

PAGE = Path("benchmarks/results/exchange.md")
PAYLOAD = 1448 / 1514
LATENCY_S = 1e-4
"""A message between two processes of this machine through two shaped links: 50 to 60 µs on an idle
one (a ping-pong), more with all ranks on two cores."""

HOSTS = (2, 4, 8, 16)
FITTED_AT = (8, 7.0, 200.0)
"""Hosts, MB, Mbit/s."""


@dataclass(frozen=True)
class Cell:
    """A measured median."""

    exchange: str
    hosts: int
    megabytes: float
    megabits_per_s: float
    taken_s: float

    @property
    def place(self) -> tuple[int, float, float]:
        return self.hosts, self.megabytes, self.megabits_per_s


def read_cells(path: Path = PAGE) -> Iterator[Cell]:
    """The medians of the page's tables."""
    text = path.read_text("utf-8")
    for title in re.finditer(r"^### (\S+) (\S)bit/s, (\S+) MB$", text, re.MULTILINE):
        rate = float(title[1]) * (1000 if title[2] == "G" else 1)
        for line in text[title.end() :].split("###")[0].splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if cells[0] in ALGORITHMS:
                for hosts, cell in zip(HOSTS, cells[1:], strict=False):
                    if found := re.match(r"([\d.]+) \(", cell):
                        yield Cell(cells[0], hosts, float(title[3]), rate, float(found[1]))


def link(megabits_per_s: float, congestion: float = 0.0) -> Link:
    rate = megabits_per_s * 1e6 / 8 * PAYLOAD
    return Link("emulated", LATENCY_S, rate, congestion=congestion)


def predicted_s(cell: Cell, congestion: float, efficiency: dict[str, float]) -> float:
    # What flows lose to each other in a switch: two hosts have nobody to meet there.
    lost = efficiency if cell.hosts > 2 else {}
    emulated = replace(link(cell.megabits_per_s, congestion), efficiency=lost)
    prices = Prices(cell.exchange, Network((emulated,), cell.hosts))
    return prices.seconds([round(cell.megabytes * 1e6 / 4)])[0]


def fit(cells: list[Cell]) -> tuple[float, dict[str, float]]:
    """The congestion, and the efficiency of each exchange."""
    at = {cell.exchange: cell for cell in cells if cell.place == FITTED_AT}
    server = at["parameter_server"]
    without = predicted_s(server, 0.0, {})
    slope = (predicted_s(server, 0.1, {}) - without) / 0.1
    congestion = max(0.0, (server.taken_s - without) / slope)
    return congestion, {
        name: predicted_s(cell, congestion, {}) / cell.taken_s for name, cell in at.items()
    }


def page() -> tuple[str, list[tuple[Cell, float]]]:
    """The section of the page, and the errors of what was not fitted."""
    cells = list(read_cells())
    congestion, efficiency = fit(cells)
    shown = ", ".join(f"{name} {each:.2f}" for name, each in efficiency.items())
    lines = [
        "## Our own emulated clusters",
        "",
        "Measured: the medians of [exchange.md](../benchmarks/results/exchange.md). Not fitted:",
        f"the link's rate (the shaper's, times {PAYLOAD:.3f}), its latency "
        f"({LATENCY_S * 1e6:g} µs).",
        f"Fitted on {FITTED_AT[0]} hosts with {FITTED_AT[1]:g} MB at {FITTED_AT[2]:g} Mbit/s:",
        f"congestion {congestion:.3f}, and each exchange's efficiency, for more than two hosts:",
        f"{shown}.",
        "",
    ]
    errors: list[tuple[Cell, float]] = []
    for rate in (200.0, 1000.0):
        for megabytes in (7.0, 28.0):
            lines += [
                f"### {rate:g} Mbit/s, {megabytes:g} MB: predicted s (error)",
                "",
                f"| exchange | {' | '.join(f'P = {hosts}' for hosts in HOSTS)} |",
                f"| --- |{' --- |' * len(HOSTS)}",
            ]
            for exchange in ALGORITHMS:
                row = []
                for hosts in HOSTS:
                    place = (exchange, hosts, megabytes, rate)
                    found = [c for c in cells if (c.exchange, *c.place) == place]
                    if not found:
                        row.append("not measured")
                        continue
                    seconds = predicted_s(found[0], congestion, efficiency)
                    error = seconds / found[0].taken_s - 1
                    if found[0].place == FITTED_AT:
                        row.append(f"{seconds:.3f} (fitted)")
                        continue
                    errors.append((found[0], error))
                    row.append(f"{seconds:.3f} ({error:+.0%})")
                lines.append(f"| {exchange} | {' | '.join(row)} |")
            lines.append("")
    return "\n".join(lines), errors
