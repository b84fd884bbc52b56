"""The devices of the shipped cluster files against published rates of one device.

The rows of P100 and K80 are among the 367 to which `planner/library_rates.toml` is fitted, as of
another library than the files name; those of Titan are not. Each row is what `firecaffe plan` says
of one worker, by the function that it calls (`planner.forecast.forecast`), with its band.
"""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.paragraph import paragraph
from firecaffe.models import MODELS
from firecaffe.models.config import ModelConfig
from firecaffe.planner.cluster import load_cluster
from firecaffe.planner.forecast import forecast
from firecaffe.planner.library_rates import FILE
from firecaffe.planner.of_recipe import workload_of_model
from firecaffe.planner.published_epochs import IMAGENET_IMAGES


@dataclass(frozen=True)
class Alone:
    """Images a second of one device."""

    cluster: str
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


def read_alone(path: Path) -> Iterator[Alone]:
    """The file's rows of one device, for networks that are ours and clusters that are shipped."""
    tables = tomllib.loads(path.read_text("utf-8"))
    for table in tables["run"]:
        first = table["alone"]
        per_s = first["epochs"] * IMAGENET_IMAGES / (first["hours"] * 3600)
        yield _alone(table["cluster"], table["net"], first["batch"], per_s)
    for family in tables["family"]:
        if "cluster" not in family or family["devices"][0] != 1:
            continue
        for key, rates in family["images_per_s"].items():
            named = re.fullmatch(r"(\w+?)_b(\d+)", key)
            assert named is not None, key
            if named[1] in MODELS:
                yield _alone(family["cluster"], named[1], int(named[2]), rates[0])


def _alone(cluster: str, net: str, batch: int, per_s: float) -> Alone:
    row = forecast(
        workload_of_model(ModelConfig(net), None, batch, batch), load_cluster(cluster), 1, "tree"
    )
    return Alone(
        cluster,
        net,
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


def page(path: Path) -> tuple[str, list[float], int]:
    """The section of the page, the errors, and how many rates lie outside their band."""
    rows = list(read_alone(path))
    outside = sum(not row.is_in_band for row in rows)
    errors = [row.error for row in rows]
    lines = [
        "## Single devices, shipped files",
        "",
        paragraph(
            """Tested: `firecaffe plan` for one worker, on shipped cluster files: data sheets, and
            the rates of `planner/library_rates.toml`. That file is fitted to rows of P100 and K80,
            too, with another library; not to Titan's. Not tested: the other devices. The paper says
            K20 for FireCaffe's single workers; Titan has faster K20Xs."""
        ),
        "",
        "| cluster file | network | batch | published, images/s | forecast | error | in band |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {row.cluster} | {row.net} | {row.batch} | {row.published_per_s:,.4g} | "
            f"{row.forecast_per_s:,.4g} | {row.error:+.0%} | {'yes' if row.is_in_band else 'no'} |"
            for row in rows
        ),
    ]
    return "\n".join(lines), errors, outside
