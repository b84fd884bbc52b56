"""One weird trick on K20s: published speedups against what `firecaffe plan --ways` says.

One constant is fitted, the device's efficiency, to the hours of one device. Each row is the way
`one_weird_trick` of the function that the command calls (`planner.split_plans.split_plans`), in
rows of as many workers as are the fastest, with as many samples a device as one alone has.
"""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from scipy.optimize import brentq

from benchmarks.kit.paragraph import paragraph
from firecaffe.models import ModelConfig
from firecaffe.planner.chain import chain_of
from firecaffe.planner.cluster import Cluster, load_cluster
from firecaffe.planner.forecast import forecast, forecasts
from firecaffe.planner.recipe_workload import workload_of_model
from firecaffe.planner.split_plans import exchange_for, split_plans
from firecaffe.planner.workload import IMAGENET_IMAGES

BY_HAND = ("overhead of a call", "latency")
"""Constants of the cluster file that no source says."""


AIM = 0.06
"""The error that was hoped for."""


@dataclass(frozen=True)
class Split:
    """A number of devices."""

    workers: int
    published: float | None
    """Speedup over one device; None if nobody's is given."""
    predicted: float
    by_data: float
    """The same, predicted of data parallelism."""

    @property
    def error(self) -> float | None:
        return None if self.published is None else self.predicted / self.published - 1

    @property
    def linear_error(self) -> float | None:
        """Of the null model: as many times as fast as there are devices."""
        return None if self.published is None else self.workers / self.published - 1


@dataclass(frozen=True)
class Record:
    """A network, with what was fitted."""

    net: str
    source: str
    batch: int
    """Images of one device in a step."""
    alone_per_s: float
    efficiency: float
    rows: list[Split]


def read_records(path: Path) -> Iterator[Record]:
    """The file's networks that were split."""
    for table in tomllib.loads(path.read_text("utf-8"))["split"]:
        net, alone = table["net"], table["alone"]
        alone_per_s = alone["epochs"] * IMAGENET_IMAGES / (alone["hours"] * 3600)
        bare = load_cluster(str(path.parent / table["cluster"]))
        cluster = fitted(bare, net, alone["batch"], alone_per_s)
        rows = [
            _split(cluster, net, alone["batch"], row["workers"], row.get("speedup"), alone_per_s)
            for row in table["rows"]
        ]
        yield Record(
            net, table["source"], alone["batch"], alone_per_s, cluster.device.efficiency, rows
        )


def fitted(cluster: Cluster, net: str, batch: int, per_s: float) -> Cluster:
    """The cluster with the efficiency at which one device has this rate."""
    work = workload_of_model(ModelConfig(net), None, batch, batch)

    def at(efficiency: float) -> Cluster:
        return replace(cluster, device=replace(cluster.device, efficiency=efficiency))

    def over(efficiency: float) -> float:
        return forecast(work, at(efficiency), 1, "tree").images_per_s - per_s

    return at(float(brentq(over, 0.01, 1.0)))


def _split(
    cluster: Cluster,
    net: str,
    batch: int,
    workers: int,
    published: float | None,
    alone_per_s: float,
) -> Split:
    config = ModelConfig(net)
    work = workload_of_model(config, None, workers * batch, batch)
    exchange = exchange_for(forecasts(work, cluster, [workers]), workers)
    ways = ["data", "one_weird_trick"]
    plans = split_plans(work, cluster, chain_of(config, work), workers, exchange, ways)
    whole, predicted = (each.images_per_s / alone_per_s for each in plans)
    return Split(workers, published, predicted, whole)


def page(path: Path) -> tuple[str, list[float], list[float]]:
    """The section of the page; the errors, and those of the null model."""
    errors, null_errors, lines = [], [], ["## One weird trick on K20s, 2014", ""]
    for record in read_records(path):
        own = [each.error for each in record.rows if each.error is not None]
        errors += own
        of_linear = [each.linear_error for each in record.rows if each.linear_error is not None]
        null_errors += of_linear
        lines += [
            paragraph(
                f"""Tested: the way `one_weird_trick` of `plan --ways`, on a file
                [from data sheets](../../benchmarks/published/k20.toml): {record.net},
                {record.batch} images a device. Fitted: the device's efficiency,
                {record.efficiency:.2f}, to one device's {record.alone_per_s:.0f} images/s. Chosen:
                {" and ".join(BY_HAND)}. Not tested: how devices share the network; other
                splits. **The aim was {AIM:.0%}; the largest error is {max(map(abs, own)):.1%}**,
                and linear's {max(map(abs, of_linear)):.1%}."""
            ),
            "",
            paragraph(
                f"""Knowing these figures we added an effect, without a constant: gradients of
                the fully connected layers are added for each micro-batch, as firecaffe does and his
                program may not. Before, the errors were +4.0% and +8.4%. Source:
                {record.source}."""
            ),
            "",
            "| devices | published | predicted | error | linear's error | by data, predicted |",
            "|---|---|---|---|---|---|",
        ]
        for row in record.rows:
            known = ("", "") if row.error is None else (f"{row.published:.2f}", f"{row.error:+.1%}")
            linear = "" if row.linear_error is None else f"{row.linear_error:+.1%}"
            lines.append(
                f"| {row.workers} | {known[0]} | {row.predicted:.2f} | "
                f"{known[1]} | {linear} | {row.by_data:.2f} |"
            )
    return "\n".join(lines), errors, null_errors
