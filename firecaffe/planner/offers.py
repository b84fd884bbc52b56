"""Clusters on offer to a buyer: devices by their data sheets, on Ethernets of any speed.

A device's rates are those of its sheet, times its library's shares (`library_rates`) and a scale.
The scale is the device's own if its published rates are in the fit, else its family's mean.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import exp
from pathlib import Path
from typing import Any

from firecaffe.errors import RecipeError
from firecaffe.planner.cluster import Cluster, Device, Link, Storage
from firecaffe.planner.library_rates import tables, unmeasured_error
from firecaffe.resume_advice import option
from firecaffe.schema import parse_toml, read_file
from firecaffe.user_code import shown

Z_80 = 1.2816
"""Standard deviations of a normal distribution within which four fifths of it lie."""


@dataclass(frozen=True)
class Usual:
    """Usual values, and spreads as standard deviations of the logarithm.

    Nine are fitted by `benchmarks/planner/published_scaling_fit.py`, and rounded. The spread of
    compute times is set by hand, because a training's first row determines them.
    """

    exchange: float = 1.4
    exchange_spread: float = 0.1
    """Time of a library's exchanges over that by the cluster's file."""
    link_spread: float = 0.225
    """Time of one link's exchanges over that of the library's."""
    slowdown: float = 1.7
    slowdown_spread: float = 0.15
    jitter: float = 0.04
    jitter_spread: float = 1.5
    scatter_spread: float = 1.0
    """The spread of one training's jitter, over the jitter of a file's trainings."""
    compute_spread: float = 0.5
    residual: float = 0.035
    """The error of a row's forecast even if all figures are known."""
    band: float = 0.7
    """Width of a band over the posterior's, because all its parts err to the same side."""

    def error(self, spread: float) -> float:
        """The error of a value with this spread within which four fifths of cases lie, rounded."""
        return float(f"{exp(self.band * Z_80 * spread) - 1:.3g}")

    def spread(self, error: float) -> float:
        """The spread of a link whose file says this error, a logarithm's as in `Posterior`."""
        return error / (self.band * Z_80)


USUAL = Usual()


def usual_device(device: Device, usual: Usual = USUAL) -> Device:
    return replace(
        device,
        jitter=usual.jitter,
        jitter_error=usual.error(usual.jitter_spread),
        exchange_slowdown=usual.slowdown,
        slowdown_error=usual.error(usual.slowdown_spread),
    )


def usual_link(link: Link, usual: Usual = USUAL) -> Link:
    return replace(link, exchange_scale=usual.exchange)


FILE = Path(__file__).parent / "devices.toml"
MAX_BYTES = 100_000


@dataclass(frozen=True)
class Sheet:
    name: str
    family: str
    memory_bytes: float
    memory_bytes_per_s: float
    flops: dict[str, float] = field(hash=False)
    """The peak by dtype."""
    link: str
    """The link between the devices of a node."""
    library: str = "cudnn8"
    power_w: float = 0.0
    source: str = ""

    @property
    def is_gpu(self) -> bool:
        return self.family != "cpu"


@cache
def _file() -> dict[str, Any]:
    return read_file(FILE, dict[str, Any], RecipeError, parse_toml, MAX_BYTES, where=FILE.name)


def sheets() -> dict[str, Sheet]:
    return {key: Sheet(**values) for key, values in _file()["device"].items()}


def sheet_of(name: str) -> Sheet:
    """Find a data sheet. Raises: RecipeError, which lists all."""
    known = sheets()
    if name not in known:
        raise RecipeError(
            f"{option('device')} is {shown(name)}; there are {', '.join(sorted(known))}"
        )
    return known[name]


def device_of(sheet: Sheet) -> Device:
    scales, is_fitted = tables()["scale"], sheet.name in tables()["scale"]
    device = Device(
        name=sheet.name,
        memory_bytes=sheet.memory_bytes,
        memory_bytes_per_s=sheet.memory_bytes_per_s,
        peak_flops=sheet.flops,
        efficiency=scales[sheet.name] if is_fitted else tables()["family_scale"][sheet.family],
        overhead_s=tables()["overhead_s"],
        library=sheet.library,
        power_w=sheet.power_w,
        error=unmeasured_error(is_fitted),
    )
    return usual_device(device) if sheet.is_gpu else device


def link_inside(sheet: Sheet, per_node: int) -> Link:
    """The link that joins `per_node` devices of a node."""
    figures = {key: value for key, value in _file()["link"][sheet.link].items() if key != "source"}
    link = Link(name=sheet.link, group=per_node, **figures)
    return usual_link(link) if sheet.is_gpu else link


USUAL_GBIT_PER_S = (1.0, 10.0, 25.0, 100.0)
MAX_GBIT_PER_S = 10_000.0
"""800 is the fastest port of today (IEEE 802.3df)."""

MAX_PER_NODE = 1_024
"""Far more than any node has."""

PAYLOAD = 1448 / 1514
"""TCP's share of a frame's bytes."""

LATENCY_S = {0.0: 2.5e-5, 10.0: 1.5e-5, 100.0: 1e-5}
"""Seconds of a small message over TCP, by the least rate in Gbit/s.

MPI over TCP takes 24.6 µs at 1 Gbit/s (OSU) and 10 µs at 100 (University of New Mexico); 10 and 25
are set between them.
"""

CONGESTION = 0.14
"""As on emulated links: see `planner.simulate`."""
ERROR = 0.2

DISK = Storage("local NVMe SSD", 3.2e9)
"""NVMe: 3.0 to 3.5 GB/s (Samsung PM983, 970 Pro)."""


def ethernet(gbit_per_s: float) -> Link:
    """Make an Ethernet link of a nominal rate, with one port per node."""
    return Link(
        name=f"{gbit_per_s:g} Gbit/s Ethernet",
        latency_s=next(s for least, s in reversed(LATENCY_S.items()) if gbit_per_s >= least),
        bandwidth_bytes_per_s=float(f"{gbit_per_s * 1e9 / 8 * PAYLOAD:.4g}"),
        congestion=CONGESTION,
        error=ERROR,
    )


def offers(device: str, rates: Sequence[float], per_node: int = 1) -> list[Cluster]:
    """Make a cluster for each Ethernet rate, the slowest first. Raises: RecipeError."""
    sheet = sheet_of(device)
    inside = (link_inside(sheet, per_node),) if per_node > 1 else ()
    between = {rate: ethernet(rate) for rate in sorted(set(rates))}
    if sheet.is_gpu:
        between = {rate: usual_link(link) for rate, link in between.items()}
    return [
        Cluster(
            name=f"{rate:g} Gbit/s",
            about=f"{sheet.name}, {per_node} a node, {rate:g} Gbit/s Ethernet between nodes",
            device=device_of(sheet),
            devices_per_node=per_node,
            links=(*inside, link),
            storage=DISK,
        )
        for rate, link in between.items()
    ]


def rates_of(typed: str) -> list[float]:
    """Parse rates in Gbit/s, as 1,10,25. Raises: RecipeError."""
    try:
        rates = [float(word) for word in typed.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(0 < rate <= MAX_GBIT_PER_S for rate in rates):
        raise RecipeError(
            f"{option('links')} is {typed!r}; it must be rates in Gbit/s with commas between, up "
            f"to {MAX_GBIT_PER_S:g}, as 1,10,25,100"
        )
    return rates
