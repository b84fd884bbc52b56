"""A picture of a plan: speedup and the parts of a step against the number of workers."""

from collections.abc import Sequence
from pathlib import Path

from firecaffe.cli.picture import load_pyplot, write_picture
from firecaffe.plan.forecast import Forecast, fastest


def plot(path: Path, plans: Sequence[tuple[str, Sequence[Forecast]]]) -> None:
    """Draw plans, given by name. Raises RecipeError if matplotlib is missing."""
    pyplot = load_pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2))
    most = 1
    for name, rows in plans:
        best = fastest(rows)
        workers = [row.workers for row in best]
        most = max(most, *workers)
        (line,) = left.plot(workers, [row.speedup for row in best], marker="o", label=name)
        alone_s = best[0].step_s * best[0].speedup
        lowest = [alone_s / row.step_high_s for row in best]
        highest = [alone_s / row.step_low_s for row in best]
        left.fill_between(workers, lowest, highest, alpha=0.15, color=line.get_color())
    left.plot([1, most], [1, most], color="gray", linestyle=":", label="as many times as workers")
    left.set(xscale="log", yscale="log", xlabel="workers", ylabel="speedup")
    left.legend()
    best = fastest(plans[0][1])
    place = range(len(best))
    floor = [0.0] * len(best)
    for part in ("compute_s", "exposed_communication_s", "data_s", "update_s"):
        heights = [getattr(row, part) for row in best]
        right.bar(place, heights, bottom=floor, label=part.removesuffix("_s").replace("_", " "))
        floor = [a + b for a, b in zip(floor, heights, strict=True)]
    right.set_xticks(list(place), [str(row.workers) for row in best])
    right.set(xlabel="workers", ylabel="seconds of a step", title=plans[0][0])
    right.legend()
    write_picture(path, figure, "firecaffe plan", "speedup and step time against workers")
    pyplot.close(figure)
