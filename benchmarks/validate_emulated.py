"""The planner against our own measurements on emulated clusters: benchmarks/results/exchange.md.

No figure is fitted: a link's rate is the token bucket's, times TCP's payload share. But the form of
`planner.simulate` and its constants were settled on such clusters, together with the emulation's
own.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from benchmarks.paragraph import paragraph
from firecaffe.exchange import ALGORITHMS
from firecaffe.planner.cluster import Link
from firecaffe.planner.ports import Network
from firecaffe.planner.price import Prices, rounds_only_s
from firecaffe.planner.simulate import BLOCK_BYTES, LONG_BLOCKS, MOST_BLOCKS, WINDOW

PAGE = Path("benchmarks/results/exchange.md")
PAYLOAD = 1448 / 1514
LATENCY_S = 1e-4
"""A message between two processes of this machine through two shaped links: 50 to 60 µs on an idle
one (a ping-pong), more with all ranks on two cores."""

BY_HAND = len((PAYLOAD, LATENCY_S, BLOCK_BYTES, MOST_BLOCKS, LONG_BLOCKS, WINDOW))
"""Constants that were chosen: those of the links here, and those of the simulator's form."""

HOSTS = (2, 4, 8, 16)


@dataclass(frozen=True)
class Cell:
    """A measured median."""

    exchange: str
    hosts: int
    megabytes: float
    megabits_per_s: float
    taken_s: float


@dataclass(frozen=True)
class Predicted:
    """A cell with the simulator's error, and that of the formula of rounds one after the other."""

    cell: Cell
    error: float
    rounds_error: float


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


def network(cell: Cell) -> Network:
    rate = cell.megabits_per_s * 1e6 / 8 * PAYLOAD
    return Network((Link("emulated", LATENCY_S, rate),), cell.hosts)


def elements(cell: Cell) -> int:
    return round(cell.megabytes * 1e6 / 4)


def predicted_s(cell: Cell) -> float:
    return Prices(cell.exchange, network(cell)).seconds([elements(cell)])[0]


@cache
def page() -> tuple[str, list[Predicted]]:
    """The section of the page, and the errors."""
    busy = read_busy()
    cells = {
        (cell.megabits_per_s, cell.megabytes, cell.exchange, cell.hosts): cell
        for cell in read_cells()
    }
    errors: list[Predicted] = []
    columns = list(dict.fromkeys(place[:2] for place in cells))
    lines = {exchange: [exchange] for exchange in ALGORITHMS}
    for rate, megabytes in columns:
        for exchange, line in lines.items():
            said = []
            for hosts in HOSTS:
                cell = cells.get((rate, megabytes, exchange, hosts))
                if cell is None:
                    said.append("not measured")
                    continue
                rounds_s = rounds_only_s(exchange, network(cell), elements(cell))
                error = predicted_s(cell) / cell.taken_s - 1
                errors.append(Predicted(cell, error, rounds_s / cell.taken_s - 1))
                said.append(f"{100 * error:+.0f}")
            line.append(", ".join(said))
    shares = [", ".join(busy[*column, hosts] for hosts in HOSTS) for column in columns]
    heads = ["exchange", *(f"{rate:g} Mbit/s, {megabytes:g} MB" for rate, megabytes in columns)]
    table = [heads, ["---"] * len(heads), *lines.values(), ["cores busy", *shares]]
    return "\n".join([*_head(errors), *(f"| {' | '.join(row)} |" for row in table)]), errors


def _head(errors: list[Predicted]) -> list[str]:
    worst = f"{max(abs(each.rounds_error) for each in errors):.0%}"
    lines = [
        "## Exchanges on emulated hosts",
        "",
        paragraph(
            f"""Tested: the simulator, one exchange at a time, against the
            medians of [these measurements](../../benchmarks/results/exchange.md). **We tuned the
            emulation and the simulator together**, with measurements on 2 to 16 such hosts in view:
            the turns of connections (blocks of 16 kB, two under way each) and the emulation's
            segments and windows. No figure is fitted to a row. We chose {BY_HAND} constants: the
            link's rate (the shaper's times {PAYLOAD:.3f}), its latency ({LATENCY_S * 1e6:g} µs) and
            four of the simulator. So one form suits all exchanges; whether it forecasts an unknown
            network is open."""
        ),
        "",
        paragraph(
            f"""The null model, the textbook's formula of rounds one after the other, knows no
            pieces that overlap: it is off by up to {worst}."""
        ),
        "",
    ]
    hosts = ", ".join(map(str, HOSTS[:-1]))
    text = f"""Errors of the simulator in per cent, on {hosts} and {HOSTS[-1]} hosts. Last row: how
        busy the two cores were that ran all hosts; the planner has cores for each host."""
    return [*lines, paragraph(text), ""]
