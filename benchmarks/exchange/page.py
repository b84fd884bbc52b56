"""The page and the picture of `benchmarks.exchange.scaling`, from its raw lines."""

import os
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from benchmarks.exchange.picture import draw
from benchmarks.exchange.plan import (
    BACK_TO_BACK_S,
    FIRST_CALL_S,
    MAX_REPETITIONS,
    MIN_REPETITIONS,
    PAYLOAD_SHARE,
    QUIET_BITS_PER_S,
)
from benchmarks.exchange.rows import Row, fits, read_rows
from firecaffe.exchange import EXCHANGES
from firecaffe.exchange.route import adds_in_tree_order
from firecaffe.exchange.schedule import PIECES

SERVER, TREE = "parameter_server", "tree"

HEAD = """# Exchanges from 2 to 32 hosts

Every exchange on emulated clusters (`benchmarks/emulated/virtual_cluster.py`): FireCaffe's
comparison of parameter server and reduction tree, with the algorithms that it did not have, against
their formulas and against the least time of any all-reduce.

{commands}

![time against the number of hosts, one panel for each rate and size]({picture})

All hosts are network namespaces of one machine, and **its {cores} cores host all ranks**: {cpu},
kernel {kernel}, torch {torch}, commit {commits}. One rank for each host, one thread each. Links:
token buckets in both directions, no delay emulated, TCP {congestion}; burst {bursts}; segments of
{segments} bytes and windows of 8, all of which a queue holds ({queue} bytes): nothing is dropped,
and what is sent again was only late.
`native` is Gloo's own all_reduce, the control.

A time is that of the slowest rank, from a point where all ranks are there, over the calls made one
after the other since (as many as take {loop:g} s by formula; one, where that takes longer); the
vector is float32. In each repetition all exchanges that are due have their turn, forth and back,
each over connections of its own: a TCP window is what its last messages have left it, and a
training has one exchange. Repetitions: {fewest} to {most} by predicted time, the column n. Each
exchange was checked in the same run before it was timed: at short vectors against the true sum,
and where it adds in tree order against the bits of the tree over random numbers; at the size
itself by a first call that does not count, but for those that take more than {first:g} s. The
result of every call was checked too; a run with one wrong sum tells no time.
"""

RATIOS = """
- **/ bound**: time over `2 (p - 1) / p · bytes / rate`, at the nominal rate. Headers alone make
  this {payload:.3f}: TCP's payload is 1448 of each 1514 bytes. (What a token bucket lets pass at
  once makes short exchanges look better.)
- **/ formula**: time over the α-β formula of [the exchange](../../docs/explanation/exchange.md),
  counted from its schedule, with α as measured between two hosts in the same run and β that of
  TCP's payload; additions are left out. In the formula a round begins when the one before it has
  ended everywhere. Between real rounds there is no barrier, and the executor sends a vector in up
  to {pieces} pieces (fewer where messages are short), one of which goes up while another comes
  down; so a time may be below the formula. **in pieces**: over the same formula where the first
  piece takes its rounds and the others what the busiest port carries.
- **/ native**: median of the ratios of the repetitions that both had.
- **tree order**: whether it adds in the order of the fixed tree at this P, computed from the
  schedule.
- **resent**: TCP segments sent again in a repetition, all hosts together, median.
"""


FITS = """Least squares of the median times against p - 1 and against ⌈lg p⌉: a server's time
grows with the first, a tree's with the second. One that does neither, as a ring, stays near the
bound, as long as two processors can carry all ranks' messages.

"""

MACHINE = """One line for each run: α and the speed of one stream between two hosts; how busy the
processors were while exchanges were timed, the share of them that neither the ranks nor interrupts
(packets, mostly) used, and all TCP segments sent again. Near 100 % the processors and not the links
set the times; from P × rate of some {quiet:g} Gbit/s on that is near where anything else runs.

"""


def write_page(raw: Path, page: Path) -> None:
    """Writes the page, and the picture beside it; both are there whole or not at all."""
    rows = read_rows(raw)
    picture = page.with_suffix(".svg")
    page.parent.mkdir(parents=True, exist_ok=True)
    new = picture.with_name(f".{picture.name}")
    draw(rows, new)
    os.replace(new, picture)
    new = page.with_name(f".{page.name}")
    new.write_text(make_page(rows, picture.name))
    os.replace(new, page)
    print(f"wrote {page} and {picture}")


def make_page(rows: Sequence[Row], picture: str) -> str:
    parts = [_head(rows, picture), "## Seconds, and times the bound\n", *_matrices(rows)]
    parts += ["## Server and tree\n", _server_or_tree(rows), _fits(rows)]
    parts += ["## Each cell\n", _ratios(), *_details(rows)]
    parts += ["## The machine meanwhile\n", _machine(rows)]
    return "\n".join(parts)


def _head(rows: Sequence[Row], picture: str) -> str:
    run = [row.line for row in rows if "cluster" in row.line]
    clusters = [line["cluster"] for line in run]
    bursts = sorted({(c["rate_bits_per_s"], c["burst_bytes"]) for c in clusters})
    return HEAD.format(
        commands="\n".join(f"    {command}" for command in _once(r.line["command"] for r in rows)),
        picture=picture,
        cores=_said(line["cores"] for line in run),
        cpu=_said(line["cpu"] for line in run),
        torch=_said(line["torch"] for line in run),
        commits=_said(line["commit"][:12] for line in run),
        kernel=_said(c["kernel"] for c in clusters),
        queue=_said(c["queue_bytes"] for c in clusters),
        segments=_said(c["segment_bytes"] for c in clusters),
        congestion=_said(c["congestion_control"] for c in clusters),
        bursts=", ".join(f"{burst} bytes at {_rate(rate)}" for rate, burst in bursts),
        loop=BACK_TO_BACK_S,
        fewest=MIN_REPETITIONS,
        most=MAX_REPETITIONS,
        first=FIRST_CALL_S,
    )


def _ratios() -> str:
    return RATIOS.format(payload=1 / PAYLOAD_SHARE, pieces=2 * PIECES).lstrip()


def _matrices(rows: Sequence[Row]) -> Iterable[str]:
    """A table for each rate and size: exchanges by hosts."""
    for words, group in _panels(rows):
        hosts = sorted({row.cell.hosts for row in group})
        by_place = {(row.cell.algorithm, row.cell.hosts): row for row in group}
        lines = [
            [f"{name}", *(_short(by_place.get((name, p))) for p in hosts)] for name in _names(group)
        ]
        yield f"### {words}\n\n{_table(['exchange', *(f'P = {p}' for p in hosts)], lines)}"
        reasons = _once(row.not_run for row in group if row.not_run)
        if reasons:
            yield "\n".join(_not_run(reason, group) for reason in reasons) + "\n"


def _not_run(reason: str, group: Sequence[Row]) -> str:
    cells = [row.cell for row in group if row.not_run == reason]
    names = list(_once(cell.algorithm for cell in cells))
    who = "all" if len(names) == len(_names(group)) else ", ".join(names)
    return f"- not run at P = {_said(cell.hosts for cell in cells)}, {who}: {reason}."


def _short(row: Row | None) -> str:
    if row is None:
        return ""
    return "not run" if row.not_run else f"{row.time_s:.3f} ({row.ratio_to_bound:.2f})"


def _server_or_tree(rows: Sequence[Row]) -> str:
    lines = []
    for words, group in _panels(rows):
        timed = {(r.cell.algorithm, r.cell.hosts): r.time_s for r in group if not r.not_run}
        for p in sorted({row.cell.hosts for row in group}):
            if (SERVER, p) in timed and (TREE, p) in timed:
                server, tree = timed[SERVER, p], timed[TREE, p]
                lines.append([words, p, f"{server:.3f}", f"{tree:.3f}", f"{server / tree:.2f}"])
    return _table(["links, vector", "P", "server, s", "tree, s", "server / tree"], lines)


def _fits(rows: Sequence[Row]) -> str:
    """By least squares, each exchange against both models: the wrong one is there to be seen."""
    lines = []
    for words, group in _panels(rows):
        for name in _names(group):
            for x, fit in fits([row for row in group if row.cell.algorithm == name]).items():
                lines.append(
                    [
                        words,
                        name,
                        f"a + b · ({x})" if "-" in x else f"a + b · {x}",
                        f"{fit.constant_s:.3f}",
                        f"{fit.slope_s:.4f}",
                        f"{fit.r_squared:.4f}",
                        fit.points,
                    ]
                )
    if not lines:
        return "No fit: an exchange must have been timed at three numbers of hosts.\n"
    return FITS + _table(
        ["links, vector", "exchange", "time", "a, s", "b, s", "R²", "points"], lines
    )


def _details(rows: Sequence[Row]) -> Iterable[str]:
    header = ["P", "exchange", "s, median", "min", "max", "n", "/ bound", "/ formula"]
    header += ["in pieces", "/ native", "tree order", "resent"]
    for words, group in _panels(rows):
        yield f"### {words}\n\n{_table(header, [_detail(row) for row in group])}"


def _detail(row: Row) -> list[object]:
    name, hosts = row.cell.algorithm, row.cell.hosts
    order = "yes" if adds_in_tree_order(name, hosts) else "no"
    if row.not_run:
        return [hosts, name, f"not run: {row.not_run}", *[""] * 7, order, ""]
    resent = sorted(row.result["retransmits"])
    return [
        hosts,
        name,
        f"{row.time_s:.3f}",
        f"{min(row.samples_s):.3f}",
        f"{max(row.samples_s):.3f}",
        len(row.samples_s),
        f"{row.ratio_to_bound:.2f}",
        _or_none(row.ratio_to_formula(in_pieces=False)),
        _or_none(row.ratio_to_formula(in_pieces=True)),
        _or_none(row.ratio_to_native),
        order,
        resent[len(resent) // 2],
    ]


def _machine(rows: Sequence[Row]) -> str:
    seen: dict[str, list[object]] = {}
    for row in rows:
        line = row.line
        if row.not_run or "conditions" not in line:
            continue
        found = line["conditions"]
        own = found["cpu_ranks_share"] + found["cpu_interrupts_share"]
        near = line["hosts"] * line["rate_bits_per_s"] > QUIET_BITS_PER_S
        seen[str((line["time"], _words(row), line["hosts"]))] = [
            _words(row),
            line["hosts"],
            line["time"],
            f"{line['alpha_s'] * 1e6:.0f} µs",
            f"{line['bandwidth_bytes_per_s'] * 8 / line['rate_bits_per_s']:.3f}",
            f"{found['cpu_busy_share']:.0%}{', near the limit' if near else ''}",
            f"{max(0.0, found['cpu_busy_share'] - own):.0%}",
            found["retransmitted_segments"],
        ]
    header = ["links, vector", "P", "UTC", "α", "stream / rate", "CPU busy", "foreign", "resent"]
    said = MACHINE.format(quiet=QUIET_BITS_PER_S / 1e9)
    return said + _table(header, list(seen.values()))


def _panels(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    return [(words, list(group)) for words, group in groupby(rows, _words)]


def _words(row: Row) -> str:
    return f"{_rate(row.cell.rate_bits_per_s)}, {row.cell.size_bytes / 1e6:g} MB"


def _rate(bits_per_s: int) -> str:
    many = bits_per_s >= 1e9
    return f"{bits_per_s / 1e9:g} Gbit/s" if many else f"{bits_per_s / 1e6:g} Mbit/s"


def _names(rows: Sequence[Row]) -> list[str]:
    return [name for name in EXCHANGES if any(row.cell.algorithm == name for row in rows)]


def _once(items: Iterable[str]) -> Iterable[str]:
    return dict.fromkeys(items).keys()


def _said(items: Iterable[object]) -> str:
    return ", ".join(dict.fromkeys(str(item) for item in items)) or "?"


def _or_none(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}"  # noqa: RUF001


def _table(header: Sequence[object], lines: Sequence[Sequence[object]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return "".join(f"| {' | '.join(str(cell) for cell in row)} |\n" for row in rows)
