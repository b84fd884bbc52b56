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
from statistics import median

from benchmarks.kit.paragraph import paragraph
from firecaffe.exchange import ALGORITHMS
from firecaffe.planner.cluster import Link
from firecaffe.planner.price import Prices, rounds_only_s
from firecaffe.planner.simulate import BLOCK_BYTES, LONG_BLOCKS, MAX_BLOCKS, WINDOW, Network

PAGE = Path("benchmarks/results/exchange.md")
PAYLOAD = 1448 / 1514
LATENCY_S = 1e-4
"""A message between two processes of this machine through two shaped links: 50 to 60 µs on an idle
one (a ping-pong), more with all ranks on two cores."""

BY_HAND = len((PAYLOAD, LATENCY_S, BLOCK_BYTES, MAX_BLOCKS, LONG_BLOCKS, WINDOW))
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
    errors = [predict(cell) for cell in read_cells()]
    columns = dict.fromkeys((each.cell.megabits_per_s, each.cell.megabytes) for each in errors)
    lines = [
        "| Mbit/s | MB | hosts | median error | largest | null, median | cores busy |",
        "|---|---|---|---|---|---|---|",
    ]
    for column in columns:
        for hosts in (HOSTS[:-1], HOSTS[-1:]):
            own = [
                each
                for each in errors
                if (each.cell.megabits_per_s, each.cell.megabytes) == column
                and each.cell.hosts in hosts
            ]
            worst = max(own, key=lambda each: abs(each.error))
            shares = [busy[*column, each] for each in (hosts[0], hosts[-1])]
            cells = [
                *(f"{number:g}" for number in column),
                " to ".join(str(each) for each in dict.fromkeys((hosts[0], hosts[-1]))),
                f"{median(abs(each.error) for each in own):.1%}",
                f"{worst.error:+.1%}, `{worst.cell.exchange}`",
                f"{median(abs(each.rounds_error) for each in own):.1%}",
                " to ".join(dict.fromkeys(shares)),
            ]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join([*_head(errors), *lines]), errors


def predict(cell: Cell) -> Predicted:
    rounds_s = rounds_only_s(cell.exchange, network(cell), elements(cell))
    return Predicted(cell, predicted_s(cell) / cell.taken_s - 1, rounds_s / cell.taken_s - 1)


def _head(errors: list[Predicted]) -> list[str]:
    worst = f"{max(abs(each.rounds_error) for each in errors):.0%}"
    return [
        "## Exchanges on emulated hosts",
        "",
        paragraph(
            f"""Tested: the simulator, one exchange at a time, against the medians of
            [these measurements](../../benchmarks/results/exchange.md). **We tuned the emulation and
            the simulator together**, with measurements on 2 to 16 such hosts in view. We chose
            {BY_HAND} constants: the link's rate (the shaper's times {PAYLOAD:.3f}), its latency
            ({LATENCY_S * 1e6:g} µs) and four of the simulator. Whether this forecasts an unknown
            network is open."""
        ),
        "",
        paragraph(
            f"""The null model, rounds one by one, is off by up to {worst}. Two cores ran
            all hosts; the planner gives each its own."""
        ),
        "",
    ]
