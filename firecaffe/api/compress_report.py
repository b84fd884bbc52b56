"""The tables, lines and picture of a compressed network."""

from collections.abc import Iterator, Mapping, Sequence
from math import log
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table

from firecaffe.api.picture import load_figure, write_picture
from firecaffe.resume_advice import option
from firecaffe.runs.measure import Measure
from firecaffe.shrink.layer_sizes import LayerSensitivity

BARS = " ▁▂▃▄▅▆▇█"
LEAST_BAR, MOST_BAR = 0.1, 100.0
"""Losses at which a bar begins and is full, on a logarithmic scale."""


Record = Mapping[str, Any]


def sensitivity_charts(layers: Sequence[LayerSensitivity], measure: Measure) -> list[Table]:
    """Return tables of the loss if one layer alone is pruned, or shares values of few bits."""
    return [
        _chart([layer for layer in layers if layer.keeps], measure, "keeps", "{:.3g} %", 100),
        _chart([layer for layer in layers if layer.bits], measure, "bits", "{} bits", 1),
    ]


def _chart(
    layers: Sequence[LayerSensitivity],
    measure: Measure,
    what: str,
    header: str,
    scale: int,
) -> Table:
    """Return a table of the layers' field `what`; `header` formats a level times `scale`."""
    levels = sorted(getattr(layers[0], what), reverse=True)
    unit = "points of " if measure.is_share else ""
    said = "keeps" if what == "keeps" else "shares values of"
    table = Table(
        title=f"{unit}{measure.words} lost on held-out samples if a layer alone {said} …",
        title_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column("layer")
    table.add_column("weights", justify="right")
    for level in levels:
        table.add_column(header.format(scale * level), justify="right")
    for layer in layers:
        lost = [getattr(layer, what)[level] for level in levels]
        table.add_row(layer.name, f"{layer.weights:,}", *(f"{bar(x)}{x:.1f}" for x in lost))
    return table


def bar(lost: float) -> str:
    if lost < LEAST_BAR:
        return BARS[0]
    part = log(lost / LEAST_BAR) / log(MOST_BAR / LEAST_BAR)
    return BARS[min(1 + int(part * (len(BARS) - 1)), len(BARS) - 1)]


def report(record: Record) -> Iterator[RenderableType]:
    measure = measure_of(record)
    yield _tensors(record)
    if record["tried"]:
        yield _tried(record, measure)
    for training in record["rounds"]:
        test = measure.shown(training["test"])
        yield f"{training['folder']}: test {measure.words} {test}"
    yield worth_line("float network", record["float"], measure)
    yield worth_line("decoded file", record["decoded"], measure) + f"; {lost_words(record)}"
    times = record["seconds_over_10_mbit_per_s"]
    yield (f"over 10 Mbit/s: {times['file']:.3g} s instead of {times['float']:.3g} s, as float32")
    yield size_line(record)


def _tensors(record: Record) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, show_footer=True, padding=(0, 1, 0, 0))
    rows = record["tensors"]
    sums = {
        word: sum(row[word] for row in rows)
        for word in ("size", "mask_bytes", "symbol_bytes", "codebook_bytes", "bytes", "floor_bytes")
    }
    kept = sum(row["kept_share"] * row["size"] for row in rows)
    table.add_column("tensor", "all")
    for header, total in (
        ("elements", f"{sums['size']:,}"),
        ("kept", f"{kept / sums['size']:.1%}"),
        ("values", ""),
        ("bits", ""),
        ("where, B", f"{sums['mask_bytes']:,.0f}"),
        ("which, B", f"{sums['symbol_bytes']:,.0f}"),
        ("values, B", f"{sums['codebook_bytes']:,.0f}"),
        ("bytes", f"{sums['bytes']:,.0f}"),
        ("entropy, B", f"{sums['floor_bytes']:,.0f}"),
        ("above it", f"{sums['bytes'] / sums['floor_bytes'] - 1:+.1%}"),
    ):
        table.add_column(header, total, justify="right")
    for row in rows:
        table.add_row(
            row["name"],
            f"{row['size']:,}",
            f"{row['kept_share']:.1%}",
            str(row["values"] or ""),
            str(row["bits"] or ""),
            *(f"{row[word]:,.0f}" for word in ("mask_bytes", "symbol_bytes", "codebook_bytes")),
            f"{row['bytes']:,.0f}",
            f"{row['floor_bytes']:,.0f}",
            f"{row['above_floor']:+.1%}" if row["floor_bytes"] else "",
        )
    return table


def _tried(record: Record, measure: Measure) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("tried")
    for header in ("bytes", "ratio", f"held-out {measure.words}", "lost", "test", "lost"):
        table.add_column(header, justify="right")
    for size in record["tried"]:
        cells = []
        for part in ("held_out", "test"):
            cells += [measure.shown(size["decoded"][part]), f"{size['lost'][part]:.2f}"]
        table.add_row(size["file"], f"{size['bytes']:,}", f"{size['ratio']:.1f}x", *cells)
    return table


def measure_of(record: Record) -> Measure:
    """Return the metric. Its direction is already in the record's losses."""
    return Measure(record["metric"], is_share=record["is_share"])


def worth_line(what: str, worth: Record, measure: Measure) -> str:
    line = f"{what}: test {measure.words} {measure.shown(worth['test'])}"
    if worth["held_out"] is None:
        return line
    return f"{line}, held-out {measure.shown(worth['held_out'])}"


def lost_words(record: Record) -> str:
    unit = " points" if record["is_share"] else ""
    lost = record["lost"]
    line = f"lost {lost['test']:.2f}{unit} of test"
    return line if lost["held_out"] is None else f"{line}, {lost['held_out']:.2f} of held-out"


def size_line(record: Record) -> str:
    return (
        f"{record['file']}: {record['bytes']:,} bytes, {record['ratio']:.1f}x "
        f"(the whole file against 4 bytes for each of {record['weights']:,} weights)"
    )


def not_reached(record: Record) -> str:
    return (
        f"{option('target')} {record['target']}: none of "
        f"{len(record['tried'])} sizes reaches it; the "
        f"nearest is {size_line(record)}, {lost_words(record)}"
    )


def plot_sizes(path: Path, record: Mapping[str, Any]) -> None:
    """Draw all sizes tried, for any target. Raises RecipeError if matplotlib is missing."""
    figure = load_figure()(figsize=(7, 4.2))
    axes = figure.subplots()
    ratios = [size["ratio"] for size in record["sizes"]]
    for part, words in (("held_out", "held-out samples"), ("test", "test samples")):
        lost = [size["lost"][part] for size in record["sizes"]]
        if None not in lost:
            axes.plot(ratios, lost, marker="o", label=words)
    axes.axhline(0, color="gray", linestyle=":", label="float network")
    unit = "points of " if record["is_share"] else ""
    axes.set(
        xscale="log",
        xlabel="4 bytes a weight / bytes of the whole file",
        ylabel=f"{unit}{record['metric']} lost",
        title=f"{record['network']}, {record['scheme']}",
    )
    axes.legend()
    write_picture(path, figure, "firecaffe compress", "what is lost against the ratio")
