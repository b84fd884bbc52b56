"""Corrects a cluster's figures by the rates of trainings on it, which a TOML file lists.

    name = "mxnet-k80"
    source = "apache/mxnet, example/image-classification, README"
    cluster = "ec2-p2"                # a shipped cluster, or a file beside this one

    [[trainings]]
    model = "inception_v3"            # a network of ours, or parameters and layers of another
    parameters = 23.8e6
    layers = 282
    batch = 32                        # samples of a device between two exchanges
    rows = [
        { devices = 1, per_s = 30.4, fit = true },
        { devices = 16, per_s = 447.61 },
    ]

Rows with `fit` correct a forecast; the other rows are used to judge it.

A data sheet leaves these figures open: a scale for the compute time of each training, one for the
time of exchanges that cross each link, how much exchanges slow down computing
(`Device.exchange_slowdown`), and the scatter of workers (`Device.jitter`). Each has a usual value
and a spread (`usual`), found on published families by
`benchmarks/planner/published_scaling.py`. Known rows move them away from the usual value
as far as they determine them: the posterior's mode in a log-normal model, with its covariance for
the bands.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import exp, hypot, log, sqrt
from pathlib import Path
from statistics import geometric_mean
from typing import Annotated, Any

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from firecaffe.errors import RecipeError
from firecaffe.exchange import NATIVE, find_schedule
from firecaffe.gradients.config import NO_COMPRESSOR
from firecaffe.models import ModelConfig
from firecaffe.planner.cluster import (
    Cluster,
    Link,
    MeasuredStep,
    Number,
    Rate,
    Some,
    check_precision,
    load_cluster,
    shipped,
)
from firecaffe.planner.compute_time import micro_batch, update_s
from firecaffe.planner.offers import USUAL, Z_80, Usual
from firecaffe.planner.recipe_workload import workload_of_model
from firecaffe.planner.simulate import Network
from firecaffe.planner.step_cost import Scales, StepCost
from firecaffe.planner.workload import LayerWork, Workload, images_of, in_precision
from firecaffe.schema import Amount, check_known, checked, parse_toml, read_file

MAX_BYTES = 1_000_000

UNCHANGED = 0.005
"""A figure within this relative distance of its usual value is reported as usual."""

UNKNOWN_FLOPS = 1e9
"""Operations of a layer of a network that is not ours; its first row scales them."""


@dataclass(frozen=True)
class RateRow:
    devices: Annotated[int, Meta(ge=1, le=1_000_000)]
    per_s: Rate
    """Samples a second of all devices together."""
    batch: Number = 0
    """Samples of a device between two exchanges; 0: the training's."""
    fit: bool = False


@dataclass(frozen=True)
class RatedTraining:
    rows: Annotated[tuple[RateRow, ...], Meta(min_length=1)]
    batch: Some
    model: str = ""
    args: dict[str, Any] = field(default_factory=dict, hash=False)
    parameters: Amount = 0.0
    layers: Annotated[int, Meta(ge=0, le=100_000)] = 0
    precision: str = "fp32"
    channels_last: bool = False
    exchange: str = NATIVE
    gradient_bytes: Some = 4
    """Bytes of one gradient element on the wire."""
    bucket_bytes: Some = 25_000_000
    """The buckets of PyTorch's DistributedDataParallel, if the source says nothing."""
    micro_batch: Number = 0
    """Samples of one backward, if gradients are added between two exchanges; 0: the batch."""
    label: str = ""

    def step_s(self, row: RateRow) -> float:
        return row.devices * self.batch_of(row) / row.per_s

    def batch_of(self, row: RateRow) -> int:
        return row.batch or self.batch

    def workload(self, row: RateRow) -> Workload:
        """Make the work of a row's step. Raises: RecipeError."""
        batch, args = self.batch_of(row), json.dumps(self.args, sort_keys=True, default=str)
        work = _work(self.model, args, self.parameters, self.layers)
        return replace(
            in_precision(work, self.precision, self.channels_last),
            global_batch_size=row.devices * batch,
            micro_batch_size=self.micro_batch or batch,
            bucket_bytes=self.bucket_bytes,
            gradient_bytes=self.gradient_bytes,
            stored_bytes=0.0,  # rates of a training are published with images in memory
            exchange=self.exchange,
        )


@dataclass(frozen=True)
class RatesFile:
    name: str
    source: str
    cluster: str
    trainings: Annotated[tuple[RatedTraining, ...], Meta(min_length=1)]
    conditions: str = ""


def load_rates(path: Path) -> tuple[RatesFile, Cluster]:
    """Read a file of rates, and its cluster. Raises: RecipeError in one line."""
    values = read_file(path, dict[str, Any], RecipeError, parse_toml, MAX_BYTES)
    try:
        rates = checked(values, RatesFile)
        check_known(values, rates)
        for training in rates.trainings:
            _check(training)
    except ValueError as error:
        raise RecipeError(f"{path}: {error}") from error
    place = rates.cluster if rates.cluster in shipped() else str(path.parent / rates.cluster)
    cluster = load_cluster(place)
    for training in rates.trainings:
        check_precision(training.precision, [cluster], f"{path}: precision of {training.model}")
    return rates, cluster


def _check(training: RatedTraining) -> None:
    label = training.model or "a training"
    if not training.model:
        raise ValueError("a training has no model; name one, or what a network of others is called")
    if bool(training.parameters) != bool(training.layers):
        raise ValueError(f"{label}: parameters and layers come together, for a network of others")
    if not any(row.fit for row in training.rows):
        raise ValueError(f"{label}: no row has fit = true; mark the rows that correct the forecast")
    for batch in map(training.batch_of, training.rows):
        if batch % (training.micro_batch or batch):
            raise ValueError(
                f"{label}: a batch of {batch} is no multiple of micro_batch = "
                f"{training.micro_batch}; batch is a device's samples between two exchanges"
            )
    if training.exchange != NATIVE:
        find_schedule(training.exchange)  # raises ValueError for an unknown one


@lru_cache(maxsize=64)
def _work(model: str, args: str, parameters: float, layers: int) -> Workload:
    """Make the work of one sample. args: of the network, as JSON, since a table has no hash."""
    if not parameters:
        return workload_of_model(ModelConfig(model, json.loads(args)), None, 1, 1)
    mean = round(parameters / layers)
    layer = LayerWork(model, UNKNOWN_FLOPS, 0.0, 4.0 * mean, shapes=((mean,),))
    return Workload(
        model=model,
        layers=(layer,) * layers,
        activation_bytes=0.0,
        layout=images_of((3, 224, 224)),
        num_classes=0,
        global_batch_size=1,
        micro_batch_size=1,
    )


@dataclass(frozen=True)
class PricedRow:
    training: int
    row: RateRow
    cost: StepCost
    level: int | None
    """The number of the outermost link that its exchange crosses."""
    measured_s: float

    def step_s(self, figures: "Figures") -> float:
        scales = Scales(
            compute=figures.compute[self.training],
            exchange=1.0 if self.level is None else figures.exchange(self.level),
            slowdown=figures.slowdown,
            jitter=figures.jitter * figures.scatter[self.training],
        )
        return self.cost.step(self.row.devices, scales).step_s


@dataclass(frozen=True)
class Figures:
    """Figures that a data sheet leaves open. Their logarithms are one vector, in this order."""

    compute: tuple[float, ...]
    scatter: tuple[float, ...]
    """Scales of each training's jitter, over that of the file's trainings."""
    links: tuple[float, ...]
    """Scales of exchanges that cross each link, over the library's."""
    library: float
    slowdown: float
    jitter: float

    @classmethod
    def of(cls, logs: NDArray[np.float64], trainings: int) -> "Figures":
        *scales, library, slowdown, jitter = np.exp(logs).tolist()
        compute, scatter = scales[:trainings], scales[trainings : 2 * trainings]
        links = scales[2 * trainings :]
        return cls(tuple(compute), tuple(scatter), tuple(links), library, slowdown, jitter)

    @property
    def all(self) -> tuple[float, ...]:
        figures = self.library, self.slowdown, self.jitter
        return (*self.compute, *self.scatter, *self.links, *figures)

    def exchange(self, level: int) -> float:
        return self.library * self.links[level]


@dataclass(frozen=True)
class Posterior:
    """A cluster whose figures known rates have corrected, with the covariance of logarithms."""

    cluster: Cluster
    trainings: Sequence[RatedTraining]
    figures: Figures
    covariance: NDArray[np.float64]
    usual: Usual

    def _spread(self, *places: int) -> float:
        """The error of a sum of logarithms within which four fifths of cases lie."""
        variance = self.covariance[np.ix_(places, places)].sum()
        return self.usual.band * Z_80 * sqrt(float(variance))

    def cluster_of(self, number: int) -> Cluster:
        scatter = self.figures.scatter[number], (len(self.trainings) + number, -1)
        return self._corrected([number], *scatter)

    def whole(self) -> Cluster:
        """Return the cluster for other trainings, with the steps of all that are known."""
        return self._corrected(range(len(self.trainings)), 1.0, (-1,))

    def lines(self) -> list[str]:
        figures = self.figures
        said = [
            f"{training.label or training.model}: compute times are {scale:.3g} of the file's"
            for training, scale in zip(self.trainings, figures.compute, strict=True)
            if not training.parameters  # the file's time of an unknown network means nothing
        ]
        said += [
            f"{link.name}: exchanges take {figures.exchange(level):.3g} of the data sheet's time"
            + self._usually(figures.exchange(level), self.usual.exchange)
            for level, link in enumerate(self.cluster.links)
        ]
        slowed = self._usually(figures.slowdown, self.usual.slowdown)
        scattered = self._usually(figures.jitter, self.usual.jitter)
        said.append(
            f"exchanges slow computing down by {figures.slowdown:.0%}{slowed}, and workers scatter "
            f"by {figures.jitter:.1%}{scattered}"
        )
        return said

    def _usually(self, value: float, usual: float) -> str:
        return ", as is usual" * (abs(value / usual - 1) < UNCHANGED)

    def _corrected(
        self, numbers: Sequence[int], scatter: float, places: tuple[int, ...]
    ) -> Cluster:
        device = replace(
            self.cluster.device,
            jitter=self.figures.jitter * scatter,
            jitter_error=exp(self._spread(*places)) - 1,
            exchange_slowdown=self.figures.slowdown,
            slowdown_error=exp(self._spread(-2)) - 1,
            measured=merged([self._measured(number) for number in numbers]),
        )
        links = tuple(self._link(link, level) for level, link in enumerate(self.cluster.links))
        return replace(self.cluster, device=device, links=links)

    def _measured(self, number: int) -> MeasuredStep:
        training, scale = self.trainings[number], self.figures.compute[number]
        work = training.workload(min(training.rows, key=lambda row: row.devices))
        bare = replace(self.cluster.device, measured=())
        one_s = micro_batch(work, bare, work.micro_batch_size).compute_s
        return MeasuredStep(
            model=work.model,
            micro_batch_size=work.micro_batch_size,
            compute_s=scale * one_s,
            update_s=scale * update_s(work, bare),
            autocast=work.autocast,
            tf32=work.tf32,
            error=hypot(self._spread(number), self.usual.band * Z_80 * self.usual.residual),
        )

    def _link(self, link: Link, level: int) -> Link:
        return replace(
            link,
            exchange_scale=self.figures.exchange(level),
            error=self._spread(2 * len(self.trainings) + level, -3),
        )


def merged(steps: Sequence[MeasuredStep]) -> tuple[MeasuredStep, ...]:
    """Merge steps of one network, arithmetic and size, with a band that reaches to all of them."""
    same: dict[tuple[str | int, ...], list[MeasuredStep]] = defaultdict(list)
    for step in steps:
        same[step.conditions].append(step)
    return tuple(
        replace(
            of_case[0],
            compute_s=geometric_mean(step.compute_s for step in of_case),
            update_s=geometric_mean(step.update_s for step in of_case),
            error=max(_half_apart(of_case), *(step.error for step in of_case)),
        )
        for of_case in same.values()
    )


def _half_apart(steps: Sequence[MeasuredStep]) -> float:
    seconds = [step.compute_s for step in steps]
    return sqrt(max(seconds) / min(seconds)) - 1


def learn_rates(
    cluster: Cluster, trainings: Sequence[RatedTraining], usual: Usual = USUAL
) -> Posterior:
    """Correct a cluster by the rows of trainings that are marked `fit`. Raises: RecipeError."""
    known = [row for row in priced_rows(cluster, trainings) if row.row.fit]
    return learn(cluster, trainings, known, usual)


def priced_rows(cluster: Cluster, trainings: Sequence[RatedTraining]) -> list[PricedRow]:
    # Jitter and slow-down are 1 here, because a row's price multiplies them by the figures.
    device = replace(cluster.device, measured=(), jitter=1.0, exchange_slowdown=1.0)
    links = tuple(replace(link, exchange_scale=1.0) for link in cluster.links)
    bare = replace(cluster, device=device, links=links)
    priced = []
    for number, training in enumerate(trainings):
        for row in training.rows:
            cost = StepCost(training.workload(row), bare, training.exchange, NO_COMPRESSOR)
            network = Network(links, row.devices)
            level = network.level(0, row.devices - 1) if row.devices > 1 else None
            priced.append(PricedRow(number, row, cost, level, training.step_s(row)))
    return priced


def learn(
    cluster: Cluster,
    trainings: Sequence[RatedTraining],
    known: Sequence[PricedRow],
    usual: Usual,
) -> Posterior:
    """Do as `learn_rates`, with the rows `known`, which are already priced."""
    from scipy.optimize import least_squares  # half a second, and most plans do not learn

    scales, links = [0.0] * len(trainings), [0.0] * len(cluster.links)
    means = [*scales, *scales, *links, *map(log, (usual.exchange, usual.slowdown, usual.jitter))]
    spreads = [
        *(usual.compute_spread for _ in scales),
        *(usual.scatter_spread for _ in scales),
        *(max(usual.link_spread, usual.spread(link.error)) for link in cluster.links),
        usual.exchange_spread,
        usual.slowdown_spread,
        usual.jitter_spread,
    ]

    def residuals(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        figures = Figures.of(logs, len(trainings))
        missed = [log(row.step_s(figures) / row.measured_s) / usual.residual for row in known]
        return np.concatenate([missed, (logs - means) / spreads])

    start = np.array(means)
    at_first = Figures.of(start, len(trainings))
    for row in reversed(known):  # so that a training's first row decides
        start[row.training] = log(row.measured_s / row.step_s(at_first))
    solution = least_squares(residuals, start)
    slopes = np.asarray(solution.jac, dtype=float)
    covariance = np.linalg.inv(slopes.T @ slopes)
    return Posterior(cluster, trainings, Figures.of(solution.x, len(trainings)), covariance, usual)
