"""A cluster as data: its devices, links, storage and prices, read from a TOML file.

Links are listed from the inside out. Each joins the groups of the link before it (the first one:
single devices) into groups of `group` devices; the last one joins whatever there is. A group has
`ports` ports into the link, which its devices share, and each port sends and receives at once.
`error` is how far a figure may be off, as a share of it: a measured file says what was measured,
a shipped one what is usual between a data sheet and a training.
"""

import tomllib
from dataclasses import dataclass, field, fields
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from firecaffe.errors import RecipeError

T = TypeVar("T")

MOST_BYTES = 1_000_000
"""Size of a cluster file that is read at most."""


@dataclass(frozen=True)
class MeasuredStep:
    """A training step of one network, measured on one device without any exchange."""

    model: str
    micro_batch_size: int
    compute_s: float
    """Forward and backward of one micro-batch: the median."""
    data_s: float = 0.0
    """Fetching one micro-batch."""
    update_s: float = 0.0
    """The optimizer's update, once a step."""
    autocast: str = "none"
    error: float = 0.0
    """Half the spread of the middle four fifths of the samples, over their median."""


@dataclass(frozen=True)
class Device:
    """One worker's processor. peak_flops: by dtype, multiply and add counted as two."""

    name: str
    memory_bytes: float
    memory_bytes_per_s: float
    peak_flops: dict[str, float] = field(hash=False)
    efficiency: float
    """The share of the peak that a long convolution reaches, of the memory rate too."""
    overhead_s: float
    """Time of every call of a layer, and of each of its two gradients, however small: the start of
    a kernel, and the time in which it does not yet fill the device. It makes small batches slow.
    """
    power_w: float = 0.0
    jitter: float = 0.0
    """The standard deviation of a worker's own time of a micro-batch, over its mean."""
    exchange_slowdown: float = 0.0
    """How much longer computing takes while an exchange is under way, as a share of its time."""
    error: float = 0.3
    measured: tuple[MeasuredStep, ...] = ()


@dataclass(frozen=True)
class Link:
    """How groups of devices are joined. A transfer of n bytes takes latency_s + n / bandwidth."""

    name: str
    latency_s: float
    bandwidth_bytes_per_s: float
    """Rate of one port, each way."""
    group: int = 0
    """Devices that it joins; 0 for the outermost, which joins all."""
    ports: int = 1
    """Ports of each group that it joins."""
    congestion: float = 0.0
    """What a port loses that more senders than one want to fill: see `plan.ports`."""
    addition_s_per_byte: float = 0.0
    """γ: what adding a byte that has arrived costs, if the exchange waits for it."""
    memory_bytes_per_s: float = 0.0
    """What each rank of a group reads and writes, all at once, in memory that they share; 0: they
    share none, or nobody measured it. Only the innermost link's is asked for."""
    error: float = 0.15
    efficiency: dict[str, float] = field(default_factory=dict, hash=False)
    """Predicted over measured time, by exchange, of those that have been measured."""


@dataclass(frozen=True)
class Storage:
    """The storage that holds the training data. Rates are of one node."""

    name: str
    read_bytes_per_s: float
    error: float = 0.3
    decoded_images_per_s: float = 0.0
    """Rate of all threads of a node, if decoding was measured; 0: nobody waits for it."""


@dataclass(frozen=True)
class CostRates:
    """What an hour costs. power_w: of a whole node under load, devices included."""

    node_usd_per_hour: float = 0.0
    electricity_usd_per_kwh: float = 0.0
    power_w: float = 0.0


@dataclass(frozen=True)
class Cluster:
    """Devices in nodes, and what joins them."""

    name: str
    about: str
    device: Device
    devices_per_node: int
    links: tuple[Link, ...]
    storage: Storage | None = None
    prices: CostRates = CostRates()
    most_devices: int = 0
    """Devices that there are; 0: as many as one likes."""
    measured_devices: int = 0
    """Devices on which all of it was measured; a plan of more takes further nodes to be like them.
    0: nobody says.
    """
    lanes: int = 1
    """Vectors under way at once: 2 if ranks exchange through Gloo between hosts."""
    failures_per_node_hour: float = 0.0
    restart_s: float = 60.0
    """Time from a failure to the next step."""
    sources: tuple[str, ...] = ()

    @property
    def is_one_host(self) -> bool:
        """Whether it has no more devices than one node, so that its links join no nodes."""
        return 0 < self.most_devices <= self.devices_per_node


def shipped() -> list[str]:
    """The names of the clusters that come with the planner."""
    folder = files("firecaffe.plan") / "clusters"
    return sorted(each.name[:-5] for each in folder.iterdir() if each.name.endswith(".toml"))


def load_cluster(name_or_path: str) -> Cluster:
    """A shipped cluster by name, or any by its file.

    Raises: RecipeError in one line, with the word that is wrong.
    """
    path = Path(name_or_path)
    try:
        if path.suffix == ".toml":
            if path.stat().st_size > MOST_BYTES:
                raise RecipeError(f"cluster {path}: larger than {MOST_BYTES / 1e6:g} MB")
            text = path.read_text(encoding="utf-8")
        elif name_or_path in shipped():
            text = (files("firecaffe.plan") / "clusters" / f"{name_or_path}.toml").read_text(
                "utf-8"
            )
        else:
            raise RecipeError(
                f"no cluster {name_or_path!r}; there are {', '.join(shipped())}, or a file (*.toml)"
            )
        return parse_cluster(tomllib.loads(text), name_or_path)
    except OSError as error:
        raise RecipeError(f"cluster {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"cluster {path}: is no TOML ({error})") from error


def parse_cluster(words: dict[str, Any], name: str) -> Cluster:
    """A cluster from a file's words. Raises: RecipeError."""
    words = dict(words)
    if not isinstance(words.get("links"), list) or not words["links"]:
        raise RecipeError(
            f"cluster {name}: links is missing; it is a list of [[links]], at least one"
        )
    device = _section(words.get("device"), f"cluster {name}: device")
    measured = device.pop("measured", [])
    if not isinstance(measured, list):
        raise RecipeError(f"cluster {name}: device.measured is no list of [[device.measured]]")
    rows = tuple(_build(MeasuredStep, row, f"cluster {name}: device.measured") for row in measured)
    words["device"] = _build(Device, {**device, "measured": rows}, f"cluster {name}: device")
    words["links"] = tuple(_build(Link, w, f"cluster {name}: links") for w in words["links"])
    for section, kind in (("storage", Storage), ("prices", CostRates)):
        if section in words:
            words[section] = _build(kind, words[section], f"cluster {name}: {section}")
    sources = words.get("sources", [])
    if not isinstance(sources, list) or not all(isinstance(each, str) for each in sources):
        raise RecipeError(f"cluster {name}: sources is no list of texts")
    words["sources"] = tuple(sources)
    words.setdefault("name", name)
    cluster = _build(Cluster, words, f"cluster {name}")
    _check(cluster)
    return cluster


def _section(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RecipeError(f"{where} is missing; it is a section, with words of its own")
    return dict(value)


def _build(kind: type[T], words: Any, where: str) -> T:
    """An object of a dataclass from a section, with each word's type checked."""
    section = _section(words, where)
    known = {each.name: each for each in fields(kind)}  # type: ignore[arg-type]
    for word, value in section.items():
        if word not in known:
            raise RecipeError(f"{where}: no word {word!r}; there are {', '.join(known)}")
        expected = known[word].type
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if expected is float and not is_number:
            raise RecipeError(f"{where}.{word} is {value!r}; it must be a number")
        if expected is int and not (is_number and float(value).is_integer()):
            raise RecipeError(f"{where}.{word} is {value!r}; it must be a whole number")
        if expected is str and not isinstance(value, str):
            raise RecipeError(f"{where}.{word} is {value!r}; it must be a text")
        if expected == dict[str, float]:
            for name, number in _section(value, f"{where}.{word}").items():
                if not isinstance(number, int | float) or not 0 < number < float("inf"):
                    raise RecipeError(f"{where}.{word}.{name} is {number!r}; it must be above 0")
        if expected is int:
            section[word] = int(value)
    try:
        return kind(**section)
    except TypeError as error:
        missing = str(error).split("missing")[-1].split(":")[-1].strip()
        raise RecipeError(f"{where}: {missing} is missing") from error


_POSITIVE = {
    "device": ("memory_bytes", "memory_bytes_per_s", "efficiency"),
    "storage": ("read_bytes_per_s",),
}
_NOT_NEGATIVE = {
    "device": ("overhead_s", "power_w", "jitter", "exchange_slowdown", "error"),
    "storage": ("error", "decoded_images_per_s"),
    "prices": ("node_usd_per_hour", "electricity_usd_per_kwh", "power_w"),
}


def _check(cluster: Cluster) -> None:
    """Raises: RecipeError if a figure cannot be."""

    def need(where: str, value: float, least: float, strict: bool) -> None:
        if not (least < value if strict else least <= value) or value == float("inf"):
            words = "above 0" if strict else f"at least {least:g}"
            raise RecipeError(f"cluster {cluster.name}: {where} is {value:g}; it must be {words}")

    for section, words in _POSITIVE.items():
        part = getattr(cluster, section)
        for word in words if part is not None else ():
            need(f"{section}.{word}", getattr(part, word), 0, strict=True)
    for section, words in _NOT_NEGATIVE.items():
        part = getattr(cluster, section)
        for word in words if part is not None else ():
            need(f"{section}.{word}", getattr(part, word), 0, strict=False)
    if "float32" not in cluster.device.peak_flops:
        raise RecipeError(f"cluster {cluster.name}: device.peak_flops.float32 is missing")
    for row in cluster.device.measured:
        need("device.measured.compute_s", row.compute_s, 0, strict=True)
        need("device.measured.micro_batch_size", row.micro_batch_size, 1, strict=False)
    need("devices_per_node", cluster.devices_per_node, 1, strict=False)
    need("lanes", cluster.lanes, 1, strict=False)
    need("failures_per_node_hour", cluster.failures_per_node_hour, 0, strict=False)
    need("restart_s", cluster.restart_s, 0, strict=False)
    need("most_devices", cluster.most_devices, 0, strict=False)
    need("measured_devices", cluster.measured_devices, 0, strict=False)
    inner = 1
    for index, link in enumerate(cluster.links):
        name = f"links[{index}]"
        need(f"{name}.bandwidth_bytes_per_s", link.bandwidth_bytes_per_s, 0, strict=True)
        for word in (
            *("latency_s", "congestion", "addition_s_per_byte", "memory_bytes_per_s", "error"),
        ):
            need(f"{name}.{word}", getattr(link, word), 0, strict=False)
        need(f"{name}.ports", link.ports, 1, strict=False)
        is_last = index == len(cluster.links) - 1
        if is_last != (link.group == 0):
            raise RecipeError(
                f"cluster {cluster.name}: {name}.group is {link.group}; the last link joins all "
                "(group 0, or left out), the others say how many devices they join"
            )
        if not is_last and (link.group <= inner or link.group % inner):
            raise RecipeError(
                f"cluster {cluster.name}: {name}.group is {link.group}; it must be a multiple of "
                f"the groups that it joins, which are of {inner}, and larger"
            )
        inner = link.group
