"""Clusters that a buyer may choose from: nodes of one kind of device, on Ethernets of any rate."""

from collections.abc import Sequence

from firecaffe.errors import RecipeError
from firecaffe.planner.cluster import Cluster, Link, Storage
from firecaffe.planner.devices import device_of, link_inside, sheet_of
from firecaffe.resume_advice import option

USUAL_GBIT_PER_S = (1.0, 10.0, 25.0, 100.0)
MOST_GBIT_PER_S = 10_000.0
"""800 is the fastest port of today (IEEE 802.3df)."""

MOST_PER_NODE = 1_024
"""Far more than any node has."""

PAYLOAD = 1448 / 1514
"""TCP's share of a frame's bytes."""

LATENCY_S = {0.0: 2.5e-5, 10.0: 1.5e-5, 100.0: 1e-5}
"""Seconds of a small message over TCP, from so many Gbit/s on.

MPI over TCP takes 24.6 µs at 1 Gbit/s (OSU) and 10 µs at 100 (University of New Mexico); 10 and 25
are set between them.
"""

CONGESTION = 0.14
"""What emulated links show: see `planner.simulate`."""
ERROR = 0.2

DISK = Storage("local NVMe SSD", 3.2e9)
"""NVMe: 3.0 to 3.5 GB/s (Samsung PM983, 970 Pro)."""


def ethernet(gbit_per_s: float) -> Link:
    """Make the Ethernet of a nominal rate, one port a node."""
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
    return [
        Cluster(
            name=f"{rate:g} Gbit/s",
            about=f"{sheet.name}, {per_node} a node, {rate:g} Gbit/s Ethernet between nodes",
            device=device_of(sheet),
            devices_per_node=per_node,
            links=(*inside, ethernet(rate)),
            storage=DISK,
        )
        for rate in sorted(set(rates))
    ]


def rates_of(typed: str) -> list[float]:
    """Parse rates in Gbit/s, as 1,10,25. Raises: RecipeError."""
    try:
        rates = [float(word) for word in typed.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(0 < rate <= MOST_GBIT_PER_S for rate in rates):
        raise RecipeError(
            f"{option('links')} is {typed!r}; it must be rates in Gbit/s with commas between, up "
            f"to {MOST_GBIT_PER_S:g}, as 1,10,25,100"
        )
    return rates
