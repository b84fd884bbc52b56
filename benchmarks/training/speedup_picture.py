"""Draws docs/speedup.svg, the picture of the README, from the record of `speedup`.

python -m benchmarks.training.speedup_picture
"""

import json
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from benchmarks.kit.themed_svg import svg
from benchmarks.training.speedup import RECORD
from firecaffe.exchange import find_schedule

PICTURE = Path(__file__).parents[2] / "docs" / "speedup.svg"
DRAWN = "halving_doubling"
COLORS = {"parameter_server": "C3", "halving_doubling": "C2"}
"""By exchange, in the order of the legend."""

LANE = 0.17
"""Between transfers of one round, as a share of the distance between rounds."""


def main() -> None:
    draw(json.loads(RECORD.read_text(encoding="utf-8")), PICTURE)


def draw(record: dict[str, Any], path: Path) -> None:
    """An SVG of a record: speed-up on the left, the schedule on the right, the digest below."""
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(10.5, 4.6), width_ratios=(1.15, 1), layout="constrained"
    )
    draw_speedup(left, record["rows"])
    draw_schedule(right, DRAWN, max(row["hosts"] for row in record["rows"]))
    figure.supxlabel(caption(record), fontsize=9)
    path.write_text(svg(figure, caption(record).replace("\n", " ")), encoding="utf-8")


def draw_speedup(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """Measured as points, from the slowest to the fastest run; forecast as lines with bands."""
    one = next(row for row in rows if row["hosts"] == 1)
    alone_s = middle(one["runs_s"])
    most = max(row["hosts"] for row in rows)
    for exchange, color in COLORS.items():
        here = [one, *(row for row in rows if row["exchange"] == exchange and row is not one)]
        hosts = [row["hosts"] for row in here]
        axes.plot(hosts, [one["forecast_s"] / row["forecast_s"] for row in here], "--", color=color)
        axes.fill_between(
            hosts,
            [one["forecast_s"] / row["high_s"] for row in here],
            [one["forecast_s"] / row["low_s"] for row in here],
            color=color,
            alpha=0.12,
            linewidth=0,
        )
        median = [alone_s / middle(row["runs_s"]) for row in here]
        spread = [
            [m - alone_s / max(row["runs_s"]) for m, row in zip(median, here, strict=True)],
            [alone_s / min(row["runs_s"]) - m for m, row in zip(median, here, strict=True)],
        ]
        label = exchange.replace("_", " ")
        axes.errorbar(hosts, median, yerr=spread, fmt="o", color=color, capsize=3, label=label)
        axes.annotate(
            f"{median[-1]:.1f}", (hosts[-1], median[-1]), (6, -3), "data", "offset points"
        )
    axes.plot([1, most], [1, most], color="gray", linestyle=":", label="as many times as workers")
    axes.plot([], [], "--", color="black", label="forecast, with its band")
    axes.plot([], [], "o", color="black", label="measured")
    axes.set_xticks([1, 2, 4, 8])
    axes.set(xlabel="workers", ylabel="times one worker", xlim=(0.7, most + 0.9))
    axes.set_title("Forecast before the first step, then measured", fontsize=11)
    axes.legend(fontsize=8, loc="upper left")
    axes.grid(alpha=0.3)


def draw_schedule(axes: Axes, exchange: str, workers: int) -> None:
    """Rounds from top to bottom, workers from left to right; an arrow for each transfer."""
    schedule = find_schedule(exchange)(workers, workers)
    rounds = schedule.rounds
    for worker in range(workers):
        axes.plot([worker, worker], [-0.3, len(rounds) - 0.4], color="gray", linewidth=0.8)
    for number, transfers in enumerate(rounds):
        for each in transfers:
            color = "C0" if each.reduce else "C1"
            # Transfers that would lie on each other lie side by side.
            distance = abs(each.source - each.destination)
            lane = min(each.source, each.destination) % distance - (distance - 1) / 2
            height = number + LANE * lane
            axes.annotate(
                "",
                (each.destination, height),
                (each.source, height),
                arrowprops={"arrowstyle": "-|>", "color": color, "linewidth": 1.4},
            )
    axes.plot([], [], color="C0", label="adds")
    axes.plot([], [], color="C1", label="overwrites")
    axes.set(xlim=(-0.6, workers - 0.4), ylim=(len(rounds) + 0.2, -0.7), xlabel="worker")
    axes.set_xticks(range(workers))
    axes.set_yticks(range(len(rounds)), [f"round {number + 1}" for number in range(len(rounds))])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title(
        f"{exchange.replace('_', ' ').capitalize()}: executed, priced, proved and drawn",
        fontsize=11,
    )
    axes.legend(fontsize=8, loc="lower right", ncols=2)


def caption(record: dict[str, Any]) -> str:
    digests = [digest for row in record["rows"] for digest in row["weights_sha256"]]
    same = f"all {len(digests)} trainings ended in the same weights, sha256 {digests[0][:12]}"
    differ = f"{len(digests)} trainings ended in {len(set(digests))} different weights"
    rate = record["rate_bits_per_s"] / 1e6
    return (
        f"{record['model']}, batch {record['global_batch_size']}, on emulated hosts of "
        f"{record['processors_of_a_host']:.3g} cores each, links of {rate:g} Mbit/s, "
        f"n = {record['runs']}:\n{same if len(set(digests)) == 1 else differ}"
    )


def middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


if __name__ == "__main__":
    main()
