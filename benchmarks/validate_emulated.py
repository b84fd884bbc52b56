"""The planner against our own measurements on emulated clusters: benchmarks/results/exchange.md.

No figure is fitted: a link's rate is the token bucket's, times TCP's payload share, and its latency
what a message between two idle hosts takes. The form of `plan.ports` was found on such clusters.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Cell:
    """A measured median."""

    exchange: str
    hosts: int
    megabytes: float
    megabits_per_s: float
    taken_s: float


def read_cells(path: Path = PAGE) -> Iterator[Cell]:
    """The medians of the page's tables."""
    text = path.read_text("utf-8")
    for title in re.finditer(r"^### (\S+) (\S)bit/s, (\S+) MB$", text, re.MULTILINE):
        rate = _megabits_per_s(title)
        for line in text[title.end() :].split("###")[0].splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if cells[0] in ALGORITHMS:
                for hosts, cell in zip(HOSTS, cells[1:], strict=False):
                    if found := re.match(r"([\d.]+) \(", cell):
                        yield Cell(cells[0], hosts, float(title[3]), rate, float(found[1]))


def read_busy(path: Path = PAGE) -> dict[tuple[float, float, int], str]:
    """By (Mbit/s, MB, hosts): how busy the cores were that host all ranks."""
    row = r"^\| (\S+) (\S)bit/s, (\S+) MB \| (\d+) \|(?:[^|]*\|){3} (\d+%)"
    return {
        (_megabits_per_s(found), float(found[3]), int(found[4])): found[5]
        for found in re.finditer(row, path.read_text("utf-8"), re.MULTILINE)
    }


def _megabits_per_s(found: re.Match[str]) -> float:
    """Of a match whose first two groups are as 200 and M, or 1 and G."""
    return float(found[1]) * (1000 if found[2] == "G" else 1)


def predicted_s(cell: Cell) -> float:
    rate = cell.megabits_per_s * 1e6 / 8 * PAYLOAD
    network = Network((Link("emulated", LATENCY_S, rate),), cell.hosts)
    return Prices(cell.exchange, network).seconds([round(cell.megabytes * 1e6 / 4)])[0]


def page() -> tuple[str, list[tuple[Cell, float]]]:
    """The section of the page, and the errors."""
    busy = read_busy()
    cells = {
        (cell.megabits_per_s, cell.megabytes, cell.exchange, cell.hosts): cell
        for cell in read_cells()
    }
    lines = [
        "## Our own emulated clusters",
        "",
        "Measured: the medians of [exchange.md](../benchmarks/results/exchange.md). No figure is",
        f"fitted: the link's rate is the shaper's, times {PAYLOAD:.3f}, and its latency "
        f"{LATENCY_S * 1e6:g} µs. But the form of",
        "the simulation (connections take turns by blocks of 16 kB, each with two under way) was",
        "found with measurements on 2 to 16 such hosts in sight, and so were the segments and",
        "windows of the emulation itself: that the form holds for all exchanges is shown here, not",
        "that it was foreseen. The last row of a table is how busy the machine's cores were, which",
        "host all ranks; the planner has cores for each.",
        "",
    ]
    errors: list[tuple[Cell, float]] = []
    for rate, megabytes in dict.fromkeys(place[:2] for place in cells):
        lines += [
            f"### {rate:g} Mbit/s, {megabytes:g} MB: predicted s (error)",
            "",
            f"| exchange | {' | '.join(f'P = {hosts}' for hosts in HOSTS)} |",
            f"| --- |{' --- |' * len(HOSTS)}",
        ]
        for exchange in ALGORITHMS:
            row = []
            for hosts in HOSTS:
                cell = cells.get((rate, megabytes, exchange, hosts))
                if cell is None:
                    row.append("not measured")
                    continue
                seconds = predicted_s(cell)
                errors.append((cell, seconds / cell.taken_s - 1))
                row.append(f"{seconds:.3f} ({errors[-1][1]:+.0%})")
            lines.append(f"| {exchange} | {' | '.join(row)} |")
        shares = [busy[rate, megabytes, hosts] for hosts in HOSTS]
        lines += [f"| cores busy | {' | '.join(shares)} |", ""]
    return "\n".join(lines), errors
