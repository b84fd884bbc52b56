"""Rates of trainings, published or measured, in a TOML file.

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

Rows with `fit` correct a forecast (`planner.learn_rates`); the others are for the judgement of it.
"""

from ast import literal_eval
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from firecaffe.errors import RecipeError
from firecaffe.exchange import NATIVE, find_schedule
from firecaffe.models.config import ModelConfig
from firecaffe.planner.cluster import Cluster, Number, Rate, Some, load_cluster, shipped
from firecaffe.planner.of_recipe import workload_of_model
from firecaffe.planner.precision import check_precision, in_precision
from firecaffe.planner.workload import LayerWork, Workload, images_of
from firecaffe.schema import Amount, check_known, checked, parse_toml, read_file

MOST_BYTES = 1_000_000

UNKNOWN_FLOPS = 1e9
"""Operations of a layer of a network that is not ours; its first row scales them."""


@dataclass(frozen=True)
class RateRow:
    devices: Some
    per_s: Rate
    """Samples a second of all devices together."""
    batch: Number = 0
    """Samples of a device between two exchanges; 0: the training's."""
    fit: bool = False
    """Whether it corrects the forecast."""


@dataclass(frozen=True)
class RatedTraining:
    rows: Annotated[tuple[RateRow, ...], Meta(min_length=1)]
    batch: Some
    model: str = ""
    args: dict[str, Any] = field(default_factory=dict, hash=False)
    parameters: Amount = 0.0
    """Of a network that is not ours."""
    layers: Number = 0
    precision: str = "fp32"
    channels_last: bool = False
    exchange: str = NATIVE
    gradient_bytes: Some = 4
    """Bytes of a number of a gradient as it travels."""
    bucket_bytes: Some = 25_000_000
    """Those of PyTorch's DistributedDataParallel, if the source says nothing."""
    label: str = ""

    def step_s(self, row: RateRow) -> float:
        return row.devices * self.batch_of(row) / row.per_s

    def batch_of(self, row: RateRow) -> int:
        return row.batch or self.batch

    def workload(self, row: RateRow) -> Workload:
        """Make the work of a row's step: a micro-batch on each device. Raises: RecipeError."""
        batch = self.batch_of(row)
        work = _work(self.model, repr(sorted(self.args.items())), self.parameters, self.layers)
        return replace(
            in_precision(work, self.precision, self.channels_last),
            global_batch_size=row.devices * batch,
            micro_batch_size=batch,
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
    values = read_file(path, dict[str, Any], RecipeError, parse_toml, MOST_BYTES)
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
    if training.exchange != NATIVE:
        find_schedule(training.exchange)  # raises ValueError for an unknown one


@lru_cache(maxsize=64)
def _work(model: str, args: str, parameters: float, layers: int) -> Workload:
    """Make the work of one sample. args: the network's, as text, which a cache can compare."""
    if not parameters:
        return workload_of_model(ModelConfig(model, dict(literal_eval(args))), None, 1, 1)
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
