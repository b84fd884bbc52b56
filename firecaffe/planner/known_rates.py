"""Compares a forecast with published rates of the same network on the same device."""

from collections.abc import Iterator
from dataclasses import dataclass

from firecaffe.planner.cluster import Cluster, Device
from firecaffe.planner.compute_time import error_of, micro_batch, update_s
from firecaffe.planner.library_rates import tables
from firecaffe.planner.workload import Workload


@dataclass(frozen=True)
class KnownRate:
    """A published rate of one device that trains alone."""

    device: str
    model: str
    precision: str
    channels_last: bool
    batch: int
    images_per_s: float
    source: str


def known_rates(work: Workload, device: Device) -> Iterator[KnownRate]:
    """Find the rates of this network, device and arithmetic."""
    key = (device.name, work.model, work.precision, work.channels_last)
    for words in tables().get("known", ()):
        rate = KnownRate(**words)
        if (rate.device, rate.model, rate.precision, rate.channels_last) == key:
            yield rate


def contradictions(work: Workload, cluster: Cluster) -> list[str]:
    """A line for each published rate that lies outside the forecast's band."""
    device, said = cluster.device, []
    error = error_of(work, device)
    for rate in known_rates(work, device):
        step_s = micro_batch(work, device, rate.batch).compute_s + update_s(work, device)
        published_s = rate.batch / rate.images_per_s
        if not (1 - error) * step_s <= published_s <= (1 + error) * step_s:
            said.append(
                f"{rate.source} has {rate.images_per_s:,.4g} images/s of {work.model} on one "
                f"{device.name} with a batch of {rate.batch}; the forecast is "
                f"{rate.batch / step_s:,.4g}, within {error:.0%}"
            )
    return said
