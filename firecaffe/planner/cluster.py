"""A cluster as data: its devices, links, storage and prices, which a TOML file describes.

Links are listed from the inside out. Each joins the groups of the link before it (the first link:
single devices) into groups of `group` devices; the last one joins all. A group has `ports` ports
into the link, which its devices share; a port sends and receives at once. `error` is how far a
figure may be off, as a share of the figure: in a measured file the measured error, in a shipped
file the usual difference between a data sheet and a training.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Self

from msgspec import Meta

from firecaffe.errors import RecipeError
from firecaffe.planner.library_rates import FLOAT32, PLAIN, TF32, libraries
from firecaffe.resume_advice import option
from firecaffe.schema import Amount, check_known, checked, parse_toml, read_file
from firecaffe.user_code import shown

FOLDER = Path(__file__).parent / "clusters"

MAX_BYTES = 1_000_000

PRECISIONS = {"fp32": FLOAT32, "tf32": TF32, "fp16": "float16", "bf16": "bfloat16"}
"""The dtype in which a step multiplies matrices, by word of `plan --precision`."""

STANDS_FOR = {"float16": "bfloat16"}
"""The dtype whose peak is used if a file has no peak of this one. Devices with bfloat16 have
float16 at the same rate; those before Ampere have only float16, which cannot replace bfloat16.
"""

Rate = Annotated[float, Meta(ge=1e-12, le=1e30)]
Number = Annotated[int, Meta(ge=0, le=10**9)]
Some = Annotated[int, Meta(ge=1, le=10**9)]


@dataclass(frozen=True)
class MeasuredStep:
    """A training step of one network, measured on one device without an exchange."""

    model: str
    micro_batch_size: Some
    compute_s: Rate
    """Forward and backward of one micro-batch: the median."""
    data_s: Amount = 0.0
    update_s: Amount = 0.0
    """The optimizer's update, once a step."""
    autocast: str = "none"
    tf32: bool = False
    inputs: str = ""
    """A sample's dtype and shape, as float32 3x224x224; empty if unknown, which fits any."""
    error: Amount = 0.0
    """Half the spread of the middle four fifths of the samples, over their median."""

    @property
    def conditions(self) -> tuple[str | int, ...]:
        return self.model, self.autocast, self.tf32, self.inputs, self.micro_batch_size

    def scaled(self, compute: float, data: float, update: float) -> Self:
        return replace(
            self,
            compute_s=self.compute_s * compute,
            data_s=self.data_s * data,
            update_s=self.update_s * update,
        )


@dataclass(frozen=True)
class Device:
    """One worker's processor. peak_flops: by dtype, multiply and add counted as two."""

    name: str
    memory_bytes: Rate
    memory_bytes_per_s: Rate
    peak_flops: dict[str, Rate] = field(hash=False)
    efficiency: Rate
    """The device's rates over those that its library's table gives for such peaks and memory."""
    overhead_s: Amount
    """Time of every kernel, however small."""
    library: str = PLAIN
    """The library of its kernels, a name of `planner/library_rates.toml`."""
    power_w: Amount = 0.0
    jitter: Amount = 0.0
    """The standard deviation of a worker's time of a micro-batch, over its mean."""
    exchange_slowdown: Amount = 0.0
    """The share by which computing takes longer during an exchange."""
    jitter_error: Amount = 0.0
    slowdown_error: Amount = 0.0
    """Both errors: the figure may be off by a factor of 1 + error."""
    error: Amount = 0.3
    measured: tuple[MeasuredStep, ...] = ()

    @property
    def memory_rate(self) -> float:
        """The bytes/s of its memory that it reaches."""
        return self.memory_bytes_per_s * self.efficiency


@dataclass(frozen=True)
class Link:
    """A link between groups of devices. n bytes take latency_s + n / bandwidth."""

    name: str
    latency_s: Amount
    bandwidth_bytes_per_s: Rate
    """The rate of one port, each way."""
    group: Number = 0
    """Devices that it joins; 0 for the outermost link, which joins all."""
    ports: Some = 1
    congestion: Amount = 0.0
    """Loss of a port that several senders want to fill; see `planner.simulate`."""
    addition_s_per_byte: Amount = 0.0
    """γ: seconds to add a byte that has arrived, if the exchange waits for it."""
    memory_bytes_per_s: Amount = 0.0
    """Rate of each rank in shared memory if all use it; 0: none or unknown. Innermost link only."""
    error: Amount = 0.15
    exchange_scale: Rate = 1.0
    """Time of exchanges whose outermost link this is, over their time by the other figures."""
    efficiency: dict[str, Rate] = field(default_factory=dict, hash=False)
    """Predicted over measured time, by exchange, if it was measured."""


@dataclass(frozen=True)
class Storage:
    """The storage that holds the training data. Rates are of one node."""

    name: str
    read_bytes_per_s: Rate
    error: Amount = 0.3
    decoded_images_per_s: Amount = 0.0
    """Decoding rate of all threads of a node; 0 if not measured: then it takes no time."""


@dataclass(frozen=True)
class CostRates:
    """Costs of an hour. power_w: of a whole node under load, devices included."""

    node_usd_per_hour: Amount = 0.0
    electricity_usd_per_kwh: Amount = 0.0
    power_w: Amount = 0.0


@dataclass(frozen=True)
class Cluster:
    name: str
    about: str
    device: Device
    devices_per_node: Some
    links: Annotated[tuple[Link, ...], Meta(min_length=1)]
    storage: Storage | None = None
    prices: CostRates = CostRates()
    most_devices: Number = 0
    """Devices that exist; 0: any number."""
    measured_devices: Number = 0
    """Devices on which all was measured; further nodes are assumed to be equal. 0: unknown."""
    cores_per_node: Number = 0
    """Cores that the workers of a node share; 0: unknown, or each device has its own."""
    lanes: Some = 1
    """Most vectors in flight at once: 2 if ranks exchange through Gloo between hosts."""
    failures_per_node_hour: Amount = 0.0
    restart_s: Amount = 60.0
    sources: tuple[str, ...] = ()

    @property
    def is_one_host(self) -> bool:
        """Whether it has no more devices than one node, so that its links join no nodes."""
        return 0 < self.most_devices <= self.devices_per_node

    def with_link(self, level: int, **figures: Any) -> Self:
        links = list(self.links)
        links[level] = replace(links[level], **figures)
        return replace(self, links=tuple(links))


def shipped() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load_cluster(name_or_path: str) -> Cluster:
    """Load a shipped cluster by name, or any by its file. Raises: RecipeError in one line."""
    path = Path(name_or_path)
    if name_or_path in shipped():
        path = FOLDER / f"{name_or_path}.toml"
    elif path.suffix != ".toml":
        raise RecipeError(
            f"no cluster {name_or_path!r}; there are {', '.join(shipped())}, or a file (*.toml)"
        )
    where = f"cluster {name_or_path}"
    values = read_file(path, dict[str, Any], RecipeError, parse_toml, MAX_BYTES, where=where)
    return parse_cluster(values, name_or_path)


RECIPE_SECTIONS = {"data", "model", "solver", "train"}


def parse_cluster(words: dict[str, Any], name: str) -> Cluster:
    if RECIPE_SECTIONS & words.keys():
        raise RecipeError(f"cluster {name}: a recipe; expected a file that describes a cluster")
    words = {"name": name, **words}
    try:
        cluster = checked(words, Cluster)
        check_known(words, cluster)
        _check(cluster)
    except ValueError as error:
        raise RecipeError(f"cluster {name}: {error}") from error
    return cluster


def _check(cluster: Cluster) -> None:
    if "float32" not in cluster.device.peak_flops:
        raise ValueError("device.peak_flops.float32 is missing")
    known = libraries()
    if cluster.device.library not in known:
        raise ValueError(
            f"device.library is {cluster.device.library!r}; there are {', '.join(known)}"
        )
    inner = 1
    for index, link in enumerate(cluster.links):
        said = f"links[{index}].group is {link.group}"
        is_last = index == len(cluster.links) - 1
        if is_last != (link.group == 0):
            raise ValueError(
                f"{said}; the last link joins all (group 0, or left out), the others say how many "
                "devices they join"
            )
        if not is_last and (link.group <= inner or link.group % inner):
            raise ValueError(
                f"{said}; it must be a multiple of the groups that it joins, which are of {inner}, "
                "and larger"
            )
        inner = link.group


def check_precision(word: str, clusters: Sequence[Cluster], named: str = "") -> None:
    """Raise RecipeError for an unknown word, or a cluster whose device has no such arithmetic.

    named: the name of the setting in messages; without it the option.
    """
    named = named or option("precision")
    if word not in ("", *PRECISIONS):
        raise RecipeError(f"{named} is {shown(word)}; it must be one of {', '.join(PRECISIONS)}")
    dtype = PRECISIONS.get(word, FLOAT32)
    for cluster in clusters:
        peaks = cluster.device.peak_flops
        if dtype not in peaks and STANDS_FOR.get(dtype) not in peaks:
            raise RecipeError(
                f"{named} is {word}, but {cluster.device.name} has no {dtype} "
                f"(device.peak_flops); there are {', '.join(peaks)}"
            )


def slower(cluster: Cluster, compute: float, link: float) -> Cluster:
    """Return the cluster with devices and links that take `compute` and `link` times as long."""
    device = cluster.device
    device = replace(
        device,
        efficiency=device.efficiency / compute,
        overhead_s=device.overhead_s * compute,
        measured=tuple(row.scaled(compute, compute, compute) for row in device.measured),
    )
    links = tuple(
        replace(
            cluster_link,
            latency_s=cluster_link.latency_s * link,
            bandwidth_bytes_per_s=cluster_link.bandwidth_bytes_per_s / link,
            memory_bytes_per_s=cluster_link.memory_bytes_per_s / link,
            addition_s_per_byte=cluster_link.addition_s_per_byte * link,
        )
        for cluster_link in cluster.links
    )
    return replace(cluster, device=device, links=links)


def crowding(cluster: Cluster, workers: int, threads: int = 1) -> float:
    """Return threads over cores on a full node; 1 if the cores suffice or are unknown."""
    busy = min(workers, cluster.devices_per_node) * threads
    return max(1.0, busy / cluster.cores_per_node) if cluster.cores_per_node else 1.0


def on_cores(cluster: Cluster, workers: int, threads: int = 1) -> Cluster:
    """Return the cluster as `workers` see it: slower if a node has too few cores for them.

    A slower cluster has `cores_per_node` 0, so a second call changes nothing.
    """
    factor = crowding(cluster, workers, threads)
    return cluster if factor == 1 else replace(slower(cluster, factor, 1.0), cores_per_node=0)
