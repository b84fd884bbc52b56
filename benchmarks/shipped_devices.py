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
from statistics import median

from benchmarks.paragraph import paragraph
from firecaffe.models import MODELS
from firecaffe.models.config import ModelConfig
from firecaffe.planner.cluster import load_cluster
from firecaffe.planner.forecast import IMAGENET_IMAGES, forecast
from firecaffe.planner.of_recipe import workload_of_model


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


def page(path: Path) -> tuple[str, list[float], int]:
    """The section of the page, the errors, and how many rates lie outside their band."""
    rows = list(read_alone(path))
    outside = sum(not row.is_in_band for row in rows)
    errors = [row.error for row in rows]
    lines = [
        "## Shipped devices, alone",
        "",
        paragraph(
            f"""Tested: `firecaffe plan`'s function for one worker, on shipped cluster files as they
            are: data sheets, and the rates of `planner/library_rates.toml`. Rows of dgx1-p100 and
            ec2-p2 are among those to which that file is fitted, with another library; Titan's are
            not. Median error {median(map(abs, errors)):.0%}; {outside} of
            {len(rows)} published rates lie outside the forecast's band. A file that
            `firecaffe check` has written has measured steps instead. Not tested: the other devices.
            The paper calls FireCaffe's single workers K20s; Titan's are K20Xs, which are faster."""
        ),
        "",
        "| cluster file | network | batch | published, images/s | forecast | band | error |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        out = "" if row.is_in_band else ", outside"
        lines.append(
            f"| {row.cluster} | {row.net} | {row.batch} | {row.published_per_s:,.4g} | "
            f"{row.forecast_per_s:,.4g} | {row.low_per_s:,.4g} to {row.high_per_s:,.4g}{out} | "
            f"{row.error:+.0%} |"
        )
    return "\n".join(lines), errors, outside
