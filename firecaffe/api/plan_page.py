"""`firecaffe plan --html`: one file with sliders over precomputed forecasts, and their pictures.

A point is the forecast for a batch, a micro-batch and a precision, by the exchange that was the
fastest for its link and number of workers.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from firecaffe.api.plan_links import LinkChoice
from firecaffe.api.plan_tables import assumptions
from firecaffe.errors import RecipeError
from firecaffe.files import write_atomically
from firecaffe.models.kernel import MATRIX, Kernel
from firecaffe.planner.advice import paragraph
from firecaffe.planner.cluster import PRECISIONS, Cluster, Device
from firecaffe.planner.compute_time import DeviceRates, kernels_s
from firecaffe.planner.forecast import Forecast, forecast
from firecaffe.planner.memory import most_micro_batch
from firecaffe.planner.workload import Workload, in_precision

BATCH_FACTORS = (1 / 8, 1 / 4, 1 / 2, 1, 2)
SIDES = tuple(2**k for k in range(3, 14))
LARGE_SIDE = 8192
"""The other two sides of the matrix products that are shown."""
DIGITS = 6


@dataclass(frozen=True)
class BatchSizes:
    """A global batch, and micro-batches that all planned workers can share."""

    batch: int
    micro: int

    def of(self, work: Workload) -> Workload:
        return replace(work, global_batch_size=self.batch, micro_batch_size=self.micro)


def sizes_of(work: Workload, most_workers: int) -> list[BatchSizes]:
    """List batches around the plan's own; if needed, smaller ones get smaller micro-batches."""
    sizes = []
    for factor in BATCH_FACTORS:
        batch, micro = int(factor * work.global_batch_size), work.micro_batch_size
        while micro > 1 and (batch % micro or batch // micro < most_workers):
            micro //= 2
        if batch // micro >= most_workers:
            sizes.append(BatchSizes(batch, micro))
    return sizes


def precisions_of(work: Workload, devices: Sequence[Device]) -> list[str]:
    """List the precisions that all devices have, with one of the two half precisions."""
    peaks = set.intersection(*(set(device.peak_flops) for device in devices)) | {work.precision}
    if "bfloat16" in peaks and work.precision != "float16":
        peaks.discard("float16")
    return [word for word, dtype in PRECISIONS.items() if dtype in peaks]


def values(choice: LinkChoice, sizes: Sequence[BatchSizes], precisions: Sequence[str]) -> list[Any]:
    """List the points, the last axis fastest; None if the network cannot be trained so."""
    return [
        _point(size.of(in_precision(choice.work, word)), cluster, row)
        for cluster, rows in choice.offers
        for row, size, word in product(rows, sizes, precisions)
    ]


def _point(work: Workload, cluster: Cluster, row: Forecast) -> dict[str, Any] | None:
    try:
        at = forecast(work, cluster, row.workers, row.exchange, row.compressor)
    except (RecipeError, ValueError):
        return None
    seconds = ("step_s", "compute_s", "exposed_communication_s", "data_s", "update_s")
    return {
        **{name: _short(getattr(at, name)) for name in seconds},
        "low_s": _short(at.step_low_s),
        "high_s": _short(at.step_high_s),
        "speedup": _short(at.speedup),
        "efficiency": _short(at.efficiency),
        "hours": None if at.whole_hours is None else _short(at.whole_hours),
        "least": at.is_at_least,
        "fits": at.fits,
        "way": at.exchange if at.workers > 1 else "none",
    }


def alone(work: Workload, cluster: Cluster) -> Iterator[tuple[int, float]]:
    """Yield samples/s of one device by its batch, while it fits."""
    for batch in (1 << k for k in range(most_micro_batch(cluster.device).bit_length())):
        row = forecast(BatchSizes(batch, batch).of(work), cluster, 1, "tree")
        if row.fits:
            yield batch, _short(row.images_per_s)


def by_kind(work: Workload, device: Device) -> dict[str, float]:
    """Seconds of forward and backward of one micro-batch by class of kernel, the longest first."""
    seconds: dict[str, float] = defaultdict(float)
    for layer in work.layers:
        for kind, forward_s, backward_s in kernels_s(layer, work, device, work.micro_batch_size):
            seconds[kind] += forward_s + backward_s
    longest = sorted(seconds.items(), key=lambda pair: -pair[1])
    return {kind: _short(taken_s) for kind, taken_s in longest if taken_s}


def skinny(work: Workload, device: Device) -> Iterator[tuple[int, float]]:
    """Yield FLOP/s of a product of matrices whose two other sides are long, by its smaller side."""
    on = DeviceRates.of(work.precision, work.channels_last, device)
    for side in SIDES:
        flops = 2.0 * side * LARGE_SIDE**2
        moved = 2.0 * side * LARGE_SIDE
        kernel = Kernel(MATRIX, flops, moved, weights=LARGE_SIDE**2, side=side)
        yield side, _short(flops / (on.kernel_s(kernel, 1) + device.overhead_s))


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def _pictures(
    cluster: Cluster, works: dict[str, Workload], sizes: Sequence[BatchSizes]
) -> dict[str, Any]:
    """The pictures of a device alone, by precision; `kinds` also by size."""
    device = cluster.device
    return {
        "alone": {word: list(alone(work, cluster)) for word, work in works.items()},
        "kinds": [[by_kind(size.of(work), device) for work in works.values()] for size in sizes],
        "skinny": {word: list(skinny(work, device)) for word, work in works.items()},
    }


def page_values(choice: LinkChoice, link: int) -> dict[str, Any]:
    """All values that the page's script shows. link: the number of the link shown first."""
    work, clusters = choice.work, [cluster for cluster, _ in choice.offers]
    sizes = sizes_of(work, choice.workers[-1])
    precisions = precisions_of(work, [cluster.device for cluster in clusters])
    works = {word: in_precision(work, word) for word in precisions}
    by_device = {cluster.device: cluster for cluster in reversed(clusters)}
    own = BatchSizes(work.global_batch_size, work.micro_batch_size)
    return {
        "links": [cluster.name for cluster in clusters],
        "workers": choice.workers,
        "batches": [asdict(size) for size in sizes],
        "precisions": precisions,
        "start": [
            link,
            len(choice.workers) - 1,
            sizes.index(own) if own in sizes else 0,
            [at.precision for at in works.values()].index(work.precision),
        ],
        "points": values(choice, sizes, precisions),
        "target": work.law.target if work.law else "",
        "devices": [list(by_device).index(cluster.device) for cluster in clusters],
        "pictures": [_pictures(cluster, works, sizes) for cluster in by_device.values()],
    }


AXES = {
    "link": ("Link", "links"),
    "workers": ("Workers", "workers"),
    "batch": ("Batch", "batches"),
    "precision": ("Precision", "precisions"),
}
"""The sliders: by id, the label and the list of its values."""


def write_page(path: Path, choice: LinkChoice, is_offered: bool) -> None:
    """Write the page of a training. is_offered: whether the clusters are links of one device."""
    if is_offered:
        link = choice.number_for(len(choice.workers) - 1)
        text = page(choice, link, choice.sentences, choice.assumptions)
    else:
        of_all = [(choice.work, cluster, rows) for cluster, rows in choice.offers]
        sentences = [f"{on.name}: {paragraph(work, on, rows)}" for work, on, rows in of_all]
        notes = dict.fromkeys(note for training in of_all for note in assumptions(*training, None))
        text = page(choice, 0, sentences, list(notes))
    write_atomically(path, text)


def page(choice: LinkChoice, link: int, sentences: Sequence[str], notes: Sequence[str]) -> str:
    """Return the page as HTML that needs no other file. link: the number of the first one."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    template = resources.files(__package__).joinpath("plan_page.html.jinja").read_text("utf-8")
    values = page_values(choice, link)
    return environment.from_string(template).render(
        choice=choice,
        sentences=sentences,
        notes=notes,
        sliders=[
            (key, label, len(values[name]) - 1, at)
            for (key, (label, name)), at in zip(AXES.items(), values["start"], strict=True)
        ],
        values=Markup(json.dumps(values).replace("<", "\\u003c")),
    )
