"""Data sheets of devices against published rates of one device.

The rows of P100 and K80 are among the 367 to which `planner/library_rates.toml` is fitted, as of
another library than the files name; those of Titan are not. Each row is what `firecaffe plan` says
of one worker, by the function that it calls (`planner.forecast.forecast`), with its band.
"""

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from benchmarks.kit.paragraph import paragraph
from benchmarks.planner.published_scaling import families
from firecaffe.models import MODELS
from firecaffe.planner.cluster import Cluster
from firecaffe.planner.forecast import forecast
from firecaffe.planner.library_rates import FILE
from firecaffe.planner.workload import Workload


@dataclass(frozen=True)
class Alone:
    """Images a second of one device."""

    device: str
    source: str
    net: str
    batch: int
    published_per_s: float
    forecast_per_s: float
    low_per_s: float
    high_per_s: float

    @property
    def error(self) -> float:
        return self.forecast_per_s / self.published_per_s - 1

    @property
    def is_in_band(self) -> bool:
        return self.low_per_s <= self.published_per_s <= self.high_per_s


def read_alone() -> Iterator[Alone]:
    """Rates of one device in the published families, for networks that are ours."""
    for rates, cluster in families():
        for training in rates.trainings:
            first = training.rows[0]
            if first.devices == 1 and training.model in MODELS:
                yield _alone(cluster, training.workload(first), rates.name, first.per_s)


def _alone(cluster: Cluster, work: Workload, source: str, per_s: float) -> Alone:
    row = forecast(work, cluster, 1, "tree")
    batch = work.micro_batch_size
    return Alone(
        cluster.device.name,
        source,
        f"{work.model}, {work.precision}",
        batch,
        per_s,
        row.images_per_s,
        batch / row.step_high_s,
        batch / row.step_low_s,
    )


def num_fitted() -> int:
    """Count the numbers that were fitted in the file of library rates, as its head says."""
    numbers = re.search(r"(\d+) numbers", FILE.read_text("utf-8"))
    assert numbers is not None
    return int(numbers[1])


def rows_page() -> str:
    """Make the record: a line for each rate."""
    lines = [
        "# Data sheets against published rates of one device",
        "",
        "    python -m benchmarks.planner.shipped_devices > benchmarks/results/shipped_devices.md",
        "",
        "| device | source | network | batch | published, images/s | forecast | error | in band |",
        "|---|---|---|---|---|---|---|---|",
        *(
            f"| {row.device} | {row.source} | {row.net} | {row.batch} "
            f"| {row.published_per_s:,.4g} | "
            f"{row.forecast_per_s:,.4g} | {row.error:+.0%} | {'yes' if row.is_in_band else 'no'} |"
            for row in read_alone()
        ),
    ]
    return "\n".join(lines) + "\n"


def page() -> tuple[str, list[float], int]:
    """The section of the page, the errors, and how many rates lie outside their band."""
    rows = list(read_alone())
    outside = sum(not row.is_in_band for row in rows)
    lines = [
        "## Single devices by data sheet",
        "",
        paragraph(
            """Tested: `firecaffe plan` for one worker, from data sheets and the rates of
            `planner/library_rates.toml` ([row by
            row](../../benchmarks/results/shipped_devices.md)). That file is fitted to rows of P100,
            K80, V100 and A100, among them those of TensorFlow's page and DLPerf. The paper says
            K20 for FireCaffe's workers; Titan has faster K20Xs."""
        ),
        "",
        "| device | n | median error | largest | in band |",
        "|---|---|---|---|---|",
    ]
    for device in dict.fromkeys(row.device for row in rows):
        some = [row for row in rows if row.device == device]
        largest = max((row.error for row in some), key=abs)
        middle = median(abs(row.error) for row in some)
        held = sum(row.is_in_band for row in some)
        lines.append(f"| {device} | {len(some)} | {middle:.0%} | {largest:+.0%} | {held} |")
    return "\n".join(lines), [row.error for row in rows], outside


if __name__ == "__main__":
    argparse.ArgumentParser(allow_abbrev=False, description=__doc__).parse_args()
    print(rows_page(), end="")
