"""What `firecaffe compress` prints: what each layer bears, where the bytes went, what was lost."""

from collections.abc import Iterator, Mapping, Sequence
from math import log
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table

from firecaffe.runs.measure import Measure
from firecaffe.shrink.layers import LayerSensitivity

BARS = " ▁▂▃▄▅▆▇█"
LEAST_BAR, MOST_BAR = 0.1, 100.0
"""Losses at which a bar begins, and is full, by their logarithm."""

Record = Mapping[str, Any]


def sensitivity_charts(layers: Sequence[LayerSensitivity], measure: Measure) -> list[Table]:
    """What is lost if a layer alone keeps a share of its weights, or has values of so many bits."""
    keeps = sorted(layers[0].keeps, reverse=True)
    bits = sorted(layers[0].bits, reverse=True)
    return [
        _chart(layers, measure, "keeps", [(f"{100 * keep:.3g} %", keep) for keep in keeps]),
        _chart(layers, measure, "bits", [(f"{each} bits", each) for each in bits]),
    ]


def _chart(
    layers: Sequence[LayerSensitivity],
    measure: Measure,
    what: str,
    levels: Sequence[tuple[str, float]],
) -> Table:
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
    for header, _ in levels:
        table.add_column(header, justify="right")
    for layer in layers:
        lost = [getattr(layer, what)[level] for _, level in levels]
        table.add_row(layer.name, f"{layer.weights:,}", *(f"{bar(x)}{x:.1f}" for x in lost))
    return table


def bar(lost: float) -> str:
    """A loss as a character."""
    if lost < LEAST_BAR:
        return BARS[0]
    part = log(lost / LEAST_BAR) / log(MOST_BAR / LEAST_BAR)
    return BARS[min(1 + int(part * (len(BARS) - 1)), len(BARS) - 1)]


def report(record: Record) -> Iterator[RenderableType]:
    """What came of it, for people."""
    measure = measure_of(record)
    yield _tensors(record)
    if record["tried"]:
        yield _tried(record, measure)
    for each in record["rounds"]:
        yield f"{each['folder']}: test {measure.words} {measure.shown(each['test'])}"
    yield worth_line("float network", record["float"], measure)
    yield worth_line("decoded file", record["decoded"], measure) + f"; {lost_words(record)}"
    times = record["seconds_over_10_mbit_per_s"]
    yield (f"over 10 Mbit/s: {times['file']:.3g} s instead of {times['float']:.3g} s, as float32")
    yield size_line(record)


def _tensors(record: Record) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, show_footer=True, padding=(0, 1, 0, 0))
    rows = record["tensors"]
    sums = {
        word: sum(each[word] for each in rows)
        for word in ("size", "mask_bytes", "symbol_bytes", "codebook_bytes", "bytes", "floor_bytes")
    }
    kept = sum(each["kept_share"] * each["size"] for each in rows)
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
    for each in rows:
        table.add_row(
            each["name"],
            f"{each['size']:,}",
            f"{each['kept_share']:.1%}",
            str(each["values"] or ""),
            str(each["bits"] or ""),
            *(f"{each[word]:,.0f}" for word in ("mask_bytes", "symbol_bytes", "codebook_bytes")),
            f"{each['bytes']:,.0f}",
            f"{each['floor_bytes']:,.0f}",
            f"{each['above_floor']:+.1%}" if each["floor_bytes"] else "",
        )
    return table


def _tried(record: Record, measure: Measure) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("tried")
    for header in ("bytes", "ratio", f"held-out {measure.words}", "lost", "test", "lost"):
        table.add_column(header, justify="right")
    for each in record["tried"]:
        cells = []
        for part in ("held_out", "test"):
            cells += [measure.shown(each["decoded"][part]), f"{each['lost'][part]:.2f}"]
        table.add_row(each["file"], f"{each['bytes']:,}", f"{each['ratio']:.1f}x", *cells)
    return table


def measure_of(record: Record) -> Measure:
    """The metric; its direction is in the losses."""
    return Measure(record["metric"], is_share=record["is_share"])


def worth_line(what: str, worth: Record, measure: Measure) -> str:
    """A network's metric in a line."""
    found = f"{what}: test {measure.words} {measure.shown(worth['test'])}"
    if worth["held_out"] is None:
        return found
    return f"{found}, held-out {measure.shown(worth['held_out'])}"


def lost_words(record: Record) -> str:
    """What a file has lost, in words."""
    unit = " points" if record["is_share"] else ""
    lost = record["lost"]
    found = f"lost {lost['test']:.2f}{unit} of test"
    return found if lost["held_out"] is None else f"{found}, {lost['held_out']:.2f} of held-out"


def size_line(record: Record) -> str:
    """The file's size and what it is measured by."""
    return (
        f"{record['file']}: {record['bytes']:,} bytes, {record['ratio']:.1f}x "
        f"(the whole file against 4 bytes for each of {record['weights']:,} weights)"
    )


def not_reached(record: Record) -> str:
    """What to say of a target that no file reaches: the nearest, and what it has lost."""
    return (
        f"--target {record['target']}: none of {len(record['tried'])} sizes reaches it; the "
        f"nearest is {size_line(record)}, {lost_words(record)}"
    )
