"""Published throughputs, predicted by the planner from a few of their own rows.

What is fitted in a family: the compute rate of each network, from its row on the fewest devices;
the bandwidth of each link, from one row that crosses it first (the network with the most gradient
bytes for its compute time); and where a family has two or more rows over several nodes, how much
slower a device computes once its exchange leaves the node, from the first of them. Everything else
is predicted: other networks, other numbers of devices, other batches.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from firecaffe.models import MODELS
from firecaffe.plan.cluster import Link
from firecaffe.plan.network import Network
from firecaffe.plan.price import LIBRARY, rounds_only_s
from firecaffe.plan.workload import layers_of

START_RATE = 1e10
CALLS_A_LAYER = 3
"""Forward, and two gradients: each with the device's overhead."""


@dataclass(frozen=True)
class Net:
    """What the exchange and the overhead need to know of a network."""

    parameters: float
    layers: int


NOT_OURS = {
    "inception_v3": Net(23.83e6, 3 * 94),
    "bert": Net(336.2e6, 24 * 14),
}
"""Szegedy et al. 2015 (94 convolutions, each with BatchNorm and ReLU); Devlin et al. 2018."""


@dataclass(frozen=True)
class Setting:
    """What a family's source says, besides its rows, of what is priced."""

    groups: tuple[int, ...] = ()
    """Devices that each inner link joins; the outermost joins all."""
    per_node: int = 1
    """Devices of a node, where rows count nodes."""
    half: bool = False
    """Gradients travel as 16-bit numbers."""
    overhead_s: float = 10e-6
    known: tuple[float, ...] = ()
    """Bandwidths that are not fitted, by link; 0: fitted."""
    batch: Mapping[int, float] = field(default_factory=dict)
    """Images of one device between two exchanges, by devices; else from the row's name."""
    ports: int = 1


SETTINGS = {
    "tf-2017-dgx1-p100": Setting(groups=(4,), overhead_s=5e-6),
    "tf-2017-ec2-k80": Setting(),
    "mxnet-k80": Setting(),
    "dell-r750xa-a100-pcie": Setting(
        groups=(4,),
        per_node=4,
        half=True,
        overhead_s=5e-6,
        known=(1.2e10, 1.1e10),
        batch={4: 408, 8: 408, 16: 204, 32: 102},
    ),
    "dell-xe8545-a100-nvlink": Setting(
        groups=(4,),
        per_node=4,
        half=True,
        overhead_s=5e-6,
        known=(2.4e11, 2.2e10),
        ports=2,
        batch={4: 256, 8: 204},
    ),
    "dgx-h100": Setting(
        groups=(8,),
        per_node=8,
        half=True,
        overhead_s=5e-6,
        known=(3.6e11, 4.5e10),
        ports=8,
        batch={8: 400, 64: 50},
    ),
    "bert-large-dgx-a100": Setting(
        groups=(8,),
        per_node=8,
        half=True,
        overhead_s=5e-6,
        known=(2.4e11, 2.2e10),
        ports=8,
        batch={8: 8192, 16: 4096},
    ),
}
"""By name; a family that is not here has one link, whose bandwidth is fitted.

Known bandwidths: what libraries reach of the links that the source names (NVLink 3 and 4: 80 %;
Omni-Path and InfiniBand: 90 %; PCI Express 4 with all four devices at once: 12 GB/s each)."""


@dataclass(frozen=True)
class Row:
    """One published rate."""

    family: str
    net: str
    devices: int
    batch: float
    per_s: float
    predicted_per_s: float | None = None
    """None for one that was used in a fit."""

    @property
    def step_s(self) -> float:
        return self.devices * self.batch / self.per_s

    @property
    def error(self) -> float:
        assert self.predicted_per_s is not None
        return self.predicted_per_s / self.per_s - 1


@dataclass
class Outcome:
    """A family with what was fitted."""

    name: str
    source: str
    rows: list[Row]
    fitted: dict[str, float]


def read_families(path: Path) -> list[dict[str, Any]]:
    families: list[dict[str, Any]] = tomllib.loads(path.read_text("utf-8"))["family"]
    return families


def predict(family: Mapping[str, Any]) -> Outcome:
    """Fits what must be fitted, and predicts the rest."""
    name = family["name"]
    setting = SETTINGS.get(name, Setting())
    rows = list(_rows(family, setting))
    fitted: dict[str, float] = {}
    first = {net: min(own, key=lambda row: row.devices) for net, own in _by_net(rows).items()}
    used = set(first.values())
    links = [
        Link(f"link {level}", 5e-6, rate or START_RATE, group, setting.ports if level else 1)
        for level, (group, rate) in enumerate(
            zip((*setting.groups, 0), (*setting.known, 0.0, 0.0), strict=False)
        )
    ]
    for level, link in enumerate(links):
        reaching = [row for row in rows if _level(links, row.devices) == level and row not in used]
        if reaching and not (level < len(setting.known) and setting.known[level]):
            few = min(row.devices for row in reaching)
            if setting.groups and level == 0:
                few = max(row.devices for row in reaching)
            at = [row for row in reaching if row.devices == few]
            row = max(at, key=lambda r: _net(r.net).parameters / first[r.net].step_s)
            excess_s = max(1e-4, row.step_s - _compute_s(row, first[row.net], setting))
            taken_s = _exchange_s(row, links, setting)
            rate = link.bandwidth_bytes_per_s * taken_s / excess_s
            links[level] = replace(link, bandwidth_bytes_per_s=rate)
            fitted[f"bandwidth of {link.name}, GB/s"] = rate / 1e9
            used.add(row)
    slower = 1.0
    outside = [row for row in rows if setting.per_node > 1 and row.devices > setting.per_node]
    if len({row.devices for row in outside}) > 1:
        row = min(outside, key=lambda row: row.devices)
        own_s = row.step_s - _exchange_s(row, links, setting)
        slower = own_s / _compute_s(row, first[row.net], setting)
        fitted["compute, once the exchange leaves the node"] = slower
        used.add(row)
    predicted = []
    for row in rows:
        if row in used:
            predicted.append(row)
            continue
        factor = slower if setting.per_node > 1 and row.devices > setting.per_node else 1.0
        step_s = factor * _compute_s(row, first[row.net], setting)
        step_s += _exchange_s(row, links, setting)
        predicted.append(replace(row, predicted_per_s=row.devices * row.batch / step_s))
    fitted["compute rates, one for each network"] = float(len(first))
    return Outcome(name, family["source"], predicted, fitted)


def _rows(family: Mapping[str, Any], setting: Setting) -> Iterator[Row]:
    devices: Sequence[int] = family.get("devices") or [
        nodes * setting.per_node for nodes in family["nodes"]
    ]
    for kind in ("images_per_s", "sequences_per_s"):
        for key, rates in family.get(kind, {}).items():
            named = re.fullmatch(r"(\w+?)_b(\d+)", key)
            net = named[1] if named else ("bert" if "bert" in family["name"] else key)
            for count, rate in zip(devices, rates, strict=True):
                batch = float(named[2]) if named else setting.batch[count]
                yield Row(family["name"], f"{net}:{key}", count, batch, rate)


def _by_net(rows: Sequence[Row]) -> dict[str, list[Row]]:
    nets: dict[str, list[Row]] = {}
    for row in rows:
        nets.setdefault(row.net, []).append(row)
    return nets


def _net(label: str) -> Net:
    name = label.split(":")[0]
    if name in NOT_OURS:
        return NOT_OURS[name]
    model = name if name in MODELS else f"{name}0"
    layers, profile = layers_of(model, None, None)
    return Net(float(profile.parameters), len(layers))


def _compute_s(row: Row, first: Row, setting: Setting) -> float:
    """The first row's step, its work scaled to this row's batch; the overhead stays."""
    overhead_s = CALLS_A_LAYER * _net(row.net).layers * setting.overhead_s
    overhead_s = min(overhead_s, 0.5 * first.step_s)
    return overhead_s + (first.step_s - overhead_s) * row.batch / first.batch


def _exchange_s(row: Row, links: Sequence[Link], setting: Setting) -> float:
    """A library's all_reduce over all devices, after backward."""
    network = Network(tuple(links), row.devices)
    itemsize = 2 if setting.half else 4
    size = round(_net(row.net).parameters)
    return min(rounds_only_s(each, network, size, itemsize) for each in LIBRARY)


def _level(links: Sequence[Link], devices: int) -> int:
    return Network(tuple(links), devices).level(0, devices - 1)
