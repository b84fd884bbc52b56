"""Draws docs/pictures from records and from the code: `python -m benchmarks.pictures`.

A picture follows the reader's light or dark theme. The same record gives the same bytes.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from benchmarks.kit.themed_svg import svg
from benchmarks.planner.published_scaling import judged
from benchmarks.training.speedup_picture import draw_schedule
from benchmarks.training.traces import RECORD as TRACES

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
LARGE_BATCH = TRACES.with_name("large_batch.json")

PARTS = {
    "data_s": ("reading data", "C4"),
    "compute_s": ("computing", "C0"),
    "exposed_communication_s": ("waiting for the exchange", "C1"),
    "update_s": ("update", "C2"),
}
"""The parts of a step in their order, with label and color; the rest of it is left white."""

RULES = {
    "unscaled": ("the rate as it was", "o"),
    "linear": ("the rate grown with the batch", "s"),
    "square root": ("with the square root of the batch", "^"),
    "LARS, warm-up": ("LARS, with a warm-up", "v"),
}

OBJECTS = (
    ("Holding", "Which part of the model\nlies on this rank?", "holdings"),
    ("Update", "Who applies an update?", "updates"),
    ("Mode", "When do ranks exchange?", "modes"),
)
"""The three objects, the question that each answers, and its package in firecaffe.training."""
VALUES = {
    "holdings": "the whole network\nlayers split over a row\nstages\nstages whose layers are split",
    "updates": "every rank\nthe owners of shards\na server: at rank 0,\nsharded, without a lock",
    "modes": "every step\nlocal replicas\nserved: backup,\nbounded staleness,\nasynchronous",
}


def timeline() -> Figure:
    """Steps of all ranks from left to right, a row for each rank."""
    record = json.loads(TRACES.read_text("utf-8"))["timeline"]
    figure, axes = plt.subplots(figsize=(9, 2.6), layout="constrained")
    for rank, steps in enumerate(record["ranks"]):
        begin = 0.0
        for step in steps:
            left = begin
            for part, (_, color) in PARTS.items():
                axes.barh(rank, step[part], left=left, height=0.6, color=color)
                left += step[part]
            begin += step["step_s"]
            axes.plot([begin, begin], [rank - 0.4, rank + 0.4], color="black", linewidth=0.8)
    for label, color in PARTS.values():
        axes.barh(0, 0, color=color, label=label)
    axes.set(xlabel="seconds", yticks=range(record["hosts"]))
    axes.set_yticklabels([f"worker {rank}" for rank in range(record["hosts"])])
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=4, fontsize=8, frameon=False)
    return figure


def layer_time() -> Figure:
    """The share of each type of layer in a step of one worker."""
    networks = json.loads(TRACES.read_text("utf-8"))["time_by_type_s"]
    figure, axes = plt.subplots(figsize=(9, 2.2), layout="constrained")
    for place, times in enumerate(networks.values()):
        left = 0.0
        for color, (kind, seconds) in enumerate(times.items()):
            share = seconds / sum(times.values())
            label = kind if place == 0 else None
            axes.barh(place, share, left=left, height=0.6, color=f"C{color}", label=label)
            left += share
    axes.set(yticks=range(len(networks)), xlabel="share of a step", xlim=(0, 1))
    axes.set_yticklabels(list(networks))
    axes.xaxis.set_major_formatter("{x:.0%}")
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=4, fontsize=8, frameon=False)
    return figure


def accuracy_by_batch() -> Figure:
    """Top-1 against the global batch, the same epochs for all, by how the rate is chosen."""
    rules = json.loads(LARGE_BATCH.read_text("utf-8"))["rules"]
    rows = [row for row in rules["rows"] if row["rate"] == min(r["rate"] for r in rules["rows"])]
    first = min(rows, key=lambda row: row["batch"])
    figure, axes = plt.subplots(figsize=(6.5, 3.4), layout="constrained")
    for rule, (label, marker) in RULES.items():
        points = [first, *(row for row in rows if row["rule"] == rule and row is not first)]
        axes.errorbar(
            [row["batch"] for row in points],
            [100 * row["top1"]["mean"] for row in points],
            yerr=[100 * row["top1"]["half"] for row in points],
            marker=marker,
            capsize=3,
            label=label,
        )
    axes.set_xscale("log", base=2)
    ticks = sorted({row["batch"] for row in rows})
    axes.set_xticks(ticks, [str(batch) for batch in ticks])
    axes.set(xlabel="global batch", ylabel="top-1, %")
    axes.legend(fontsize=8, frameon=False)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def tree() -> Figure:
    """The rounds of the reduction tree over eight workers."""
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    draw_schedule(axes, "tree", 8)
    axes.set_title("")
    return figure


def objects() -> Figure:
    """The three objects of a training, each with its question and its values."""
    figure = plt.figure(figsize=(9, 3))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 3), ylim=(0, 1))
    axes.axis("off")
    for place, (name, question, package) in enumerate(OBJECTS):
        box = FancyBboxPatch(
            (place + 0.06, 0.08), 0.88, 0.86, "round,pad=0,rounding_size=0.04", fill=False
        )
        axes.add_patch(box)
        middle = place + 0.5
        center: dict[str, Any] = {"ha": "center", "va": "center"}
        axes.text(middle, 0.84, name, fontsize=12, fontweight="bold", **center)
        axes.text(middle, 0.67, question, fontsize=10, style="italic", **center)
        axes.text(middle, 0.40, VALUES[package], fontsize=9, linespacing=1.5, **center)
        axes.text(middle, 0.14, f"training/{package}/", fontsize=8, family="monospace", **center)
    return figure


def forecasts() -> Figure:
    """Published throughputs against their forecasts, with bands, by how many rows were known."""
    figure, panels = plt.subplots(1, 2, figsize=(9, 4), layout="constrained", sharey=True)
    for axes, known, said in zip(panels, (1, 2), ("one row known", "two rows known"), strict=True):
        rows = judged(known)
        ends = min(row.per_s for row in rows) / 2, max(row.per_s for row in rows) * 2
        axes.plot(ends, ends, color="#808080", linewidth=0.8)
        for is_in, color, word in ((True, "C0", "in the band"), (False, "C1", "outside")):
            own = [row for row in rows if row.in_band is is_in]
            published = [row.per_s for row in own]
            forecast = [row.forecast_per_s for row in own]
            bands = [
                [row.forecast_per_s - row.low_per_s for row in own],
                [row.high_per_s - row.forecast_per_s for row in own],
            ]
            label = f"{len(own)} of {len(rows)} {word}"
            look: dict[str, Any] = {"fmt": "o", "markersize": 3, "elinewidth": 0.8, "color": color}
            axes.errorbar(published, forecast, yerr=bands, label=label, **look)
        axes.set(xscale="log", yscale="log", xlabel="samples/s, published", title=said)
        axes.legend(fontsize=8, frameon=False)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("samples/s, forecast")
    return figure


PICTURES: dict[str, tuple[Callable[[], Figure], str]] = {
    "timeline": (timeline, "Steps of four workers: reading, computing, waiting, updating."),
    "layer_time": (layer_time, "The share of each type of layer in a step of three networks."),
    "accuracy_by_batch": (
        accuracy_by_batch,
        "Accuracy against the batch for four rules of the learning rate: all lose at the largest.",
    ),
    "tree": (tree, "The tree over eight workers adds in three rounds and copies back in three."),
    "forecasts": (
        forecasts,
        "Published samples a second against forecasts, log-log: most lie in their bands.",
    ),
    "objects": (objects, "Holding, update and mode: the three choices of a training."),
}
"""Each picture's drawing, and its text for those who cannot see it."""


def main(folder: Path = FOLDER) -> None:
    folder.mkdir(exist_ok=True)
    for name, (draw, text) in PICTURES.items():
        (folder / f"{name}.svg").write_text(svg(draw(), text), encoding="utf-8")


if __name__ == "__main__":
    main()
