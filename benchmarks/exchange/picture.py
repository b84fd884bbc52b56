"""The picture of `benchmarks.exchange.scaling`: time against the number of hosts."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

from benchmarks.exchange.plan import Cell, bound_s, formula_s
from benchmarks.exchange.rows import Row
from firecaffe.exchange import EXCHANGES, NATIVE

mpl.use("svg")

from matplotlib import pyplot as plt
from matplotlib.artist import Artist

WITH_FORMULA = ("parameter_server", "tree")
MARKERS = "osD^vP*XhH"


def draw(rows: Sequence[Row], path: Path) -> None:
    """An SVG with a panel for each rate and size: both axes logarithmic, least to largest as bars.

    Black: the bound. Dotted: the formulas of server and tree, round after round.
    """
    # The same raw file gives the same bytes.
    mpl.rcParams["svg.hashsalt"] = "exchange"
    rates = sorted({row.cell.rate_bits_per_s for row in rows})
    sizes = sorted({row.cell.size_bytes for row in rows})
    ticks = sorted({row.cell.hosts for row in rows if not row.not_run})
    shape = len(rates), len(sizes)
    figure, axes = plt.subplots(
        *shape, figsize=(max(9, 5.5 * shape[1]), 4 * shape[0] + 0.8), squeeze=False, sharex=True
    )
    for i, rate in enumerate(rates):
        for j, size in enumerate(sizes):
            axis = axes[i][j]
            here = [r for r in rows if (r.cell.rate_bits_per_s, r.cell.size_bytes) == (rate, size)]
            hosts = sorted({row.cell.hosts for row in here if not row.not_run})
            if not hosts:  # a rate and a size that were not run together
                axis.set_axis_off()
                continue
            for number, name in enumerate(EXCHANGES):
                timed = [r for r in here if r.cell.algorithm == name and not r.not_run]
                if not timed:
                    continue
                medians = [row.time_s for row in timed]
                axis.errorbar(
                    [row.cell.hosts for row in timed],
                    medians,
                    yerr=[
                        [row.time_s - min(row.samples_s) for row in timed],
                        [max(row.samples_s) - row.time_s for row in timed],
                    ],
                    color=f"C{number}",
                    marker=MARKERS[number],
                    markersize=4,
                    linewidth=2 if name in (*WITH_FORMULA, NATIVE) else 1,
                    label=name,
                )
                if name in WITH_FORMULA:
                    alphas = {row.cell.hosts: row.line["alpha_s"] for row in timed}
                    predicted = [
                        formula_s(r.cell, alphas[r.cell.hosts], in_pieces=False) for r in timed
                    ]
                    axis.plot(list(alphas), predicted, ":", color=f"C{number}")
            bounds = [bound_s(Cell(p, rate, size, NATIVE)) for p in hosts]
            axis.plot(hosts, bounds, "k--", linewidth=1, label="bound")
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.set_xticks(ticks, [str(p) for p in ticks])
            axis.set_title(f"links of {rate / 1e6:g} Mbit/s, {size / 1e6:g} MB")
            axis.grid(alpha=0.3)
    for axis in axes[-1]:
        axis.set_xlabel("hosts")
    for of_row in axes:
        of_row[0].set_ylabel("seconds")
    entries: dict[str, Artist] = {}
    for axis in axes.flat:
        handles, labels = axis.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    figure.legend(list(entries.values()), list(entries), loc="lower center", ncols=5, fontsize=8)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(path, format="svg", metadata={"Date": None})
    plt.close(figure)
