"""Published throughputs, by a model of their own: fitted rows, and what it says of the others.

What this prices is not what `firecaffe plan` prices: no overlap of the exchange with backward, no
buckets, no simulation of transfers, no cluster file; and a family may have a slow-down of computing
once its exchange leaves the node, which no cluster file has. Of the planner it uses the formula of
rounds one after the other (`planner.price.rounds_only_s`), with `Network` and the layers' sizes.

Which rows are used in a fit is marked in the data file. Of each network its row on the fewest
devices gives its compute rate. Each further one gives the bandwidth of the link that it crosses, or
where that is set by hand, how much slower a device computes once its exchange leaves the node.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import log2
from pathlib import Path
from typing import Any

from firecaffe.models import MODELS
from firecaffe.models.config import ModelConfig
from firecaffe.planner.cluster import Link
from firecaffe.planner.ports import Network
from firecaffe.planner.price import NATIVE_CANDIDATES, rounds_only_s
from firecaffe.planner.workload import layers_of

START_RATE = 1e10
LATENCY_S = 5e-6
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
"""By name; a family that is not here has one link, whose bandwidth is fitted. Set by hand.

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
    is_implied: bool = False
    """Whether it follows from the fitted ones, whatever the model is."""
    linear_per_s: float = 0.0
    """By the null model: the network's row on the fewest devices, times devices."""
    log_per_s: float | None = None
    """By the other null model, t = a + b lg p through the network's two rows on the fewest devices;
    None for these two, and where a device's batch changes with their number."""

    @property
    def step_s(self) -> float:
        return self.devices * self.batch / self.per_s

    @property
    def error(self) -> float:
        assert self.predicted_per_s is not None
        return self.predicted_per_s / self.per_s - 1

    @property
    def linear_error(self) -> float:
        return self.linear_per_s / self.per_s - 1

    @property
    def log_error(self) -> float | None:
        return None if self.log_per_s is None else self.log_per_s / self.per_s - 1


@dataclass
class Outcome:
    """A family with what was fitted."""

    name: str
    source: str
    rows: list[Row]
    fitted: dict[str, float]
    set_by_hand: dict[str, float]


def read_families(path: Path) -> list[dict[str, Any]]:
    families: list[dict[str, Any]] = tomllib.loads(path.read_text("utf-8"))["family"]
    return families


def predict(family: Mapping[str, Any]) -> Outcome:
    """Fits the marked rows, and predicts the others."""
    name = family["name"]
    setting = SETTINGS.get(name, Setting())
    rows = list(_rows(family, setting))
    first = {net: own[0] for net, own in _by_net(rows).items()}
    used = [row for row in rows if _is_marked(family, "fitted", row)]
    if not set(first.values()) <= set(used):
        raise SystemExit(f"{name}: of each network its first row has to be marked as fitted")
    known = [*setting.known, 0.0, 0.0]
    links = [
        Link(f"link {level}", LATENCY_S, rate or START_RATE, group, setting.ports if level else 1)
        for level, (group, rate) in enumerate(zip((*setting.groups, 0), known, strict=False))
    ]
    fitted = {"compute rates": float(len(first))}
    slower = 1.0
    for row in sorted(set(used) - set(first.values()), key=lambda row: row.devices):
        own_s, exchange_s = (
            _compute_s(row, first[row.net], setting),
            _exchange_s(row, links, setting),
        )
        level = _level(links, row.devices)
        if known[level]:
            slower = (row.step_s - exchange_s) / own_s
            fitted["compute outside the node, times"] = slower
            continue
        link = links[level]
        rate = link.bandwidth_bytes_per_s * exchange_s / max(1e-4, row.step_s - own_s)
        links[level] = replace(link, bandwidth_bytes_per_s=rate)
        fitted[f"{link.name}, GB/s"] = rate / 1e9
    predicted = []
    for row in rows:
        factor = slower if setting.per_node > 1 and row.devices > setting.per_node else 1.0
        step_s = factor * _compute_s(row, first[row.net], setting)
        step_s += _exchange_s(row, links, setting)
        own = [each for each in rows if each.net == row.net]
        predicted.append(
            replace(
                row,
                predicted_per_s=None if row in used else row.devices * row.batch / step_s,
                is_implied=_is_marked(family, "implied", row),
                linear_per_s=own[0].per_s * row.devices / own[0].devices,
                log_per_s=_log_per_s(own, row),
            )
        )
    return Outcome(name, family["source"], predicted, fitted, _set_by_hand(setting))


def _is_marked(family: Mapping[str, Any], mark: str, row: Row) -> bool:
    return row.devices in family.get(mark, {}).get(row.net.split(":")[1], [])


def _log_per_s(own: Sequence[Row], row: Row) -> float | None:
    """By t = a + b lg p through the first two of a network's rows."""
    if row in own[:2] or len({each.batch for each in own}) > 1:
        return None
    one, two = own[:2]
    slope = (two.step_s - one.step_s) / log2(two.devices / one.devices)
    return row.devices * row.batch / (one.step_s + slope * log2(row.devices / one.devices))


def _set_by_hand(setting: Setting) -> dict[str, float]:
    """What no row was asked for, and the source does not say."""
    constants = {"latency, s": LATENCY_S, "overhead of a call, s": setting.overhead_s}
    reached = {f"link {level}, GB/s": rate / 1e9 for level, rate in enumerate(setting.known)}
    return constants | reached


def _rows(family: Mapping[str, Any], setting: Setting) -> Iterator[Row]:
    devices: Sequence[int] = family.get("devices") or [
        nodes * setting.per_node for nodes in family["nodes"]
    ]
    for kind in ("images_per_s", "sequences_per_s"):
        for key, rates in family.get(kind, {}).items():
            named = re.fullmatch(r"(\w+?)_b(\d+)", key)
            net = named[1] if named else ("bert" if "bert" in family["name"] else key)
            for count, rate in sorted(zip(devices, rates, strict=True)):
                batch = float(named[2]) if named else setting.batch[count]
                yield Row(family["name"], f"{net}:{key}", count, batch, rate)


def _by_net(rows: Sequence[Row]) -> dict[str, list[Row]]:
    nets: dict[str, list[Row]] = {}
    for row in rows:
        nets.setdefault(row.net, []).append(row)
    return nets


@cache
def _net(label: str) -> Net:
    name = label.split(":")[0]
    if name in NOT_OURS:
        return NOT_OURS[name]
    model = name if name in MODELS else f"{name}0"
    found = layers_of(ModelConfig(model), None, None)
    layers, profile = found.works, found.profile
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
    return min(rounds_only_s(each, network, size, itemsize) for each in NATIVE_CANDIDATES)


def _level(links: Sequence[Link], devices: int) -> int:
    return Network(tuple(links), devices).level(0, devices - 1)
