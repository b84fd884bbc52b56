"""Published trainings to compare a forecast with: rates on devices, and epochs by batch."""

from collections.abc import Iterator
from dataclasses import dataclass

from firecaffe.planner.cluster import Cluster, Device
from firecaffe.planner.compute_time import error_of, micro_batch, update_s
from firecaffe.planner.epochs_law import EpochsLaw, law_of
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
    """Return a line for each published rate that lies outside the forecast's band."""
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


IMAGENET_IMAGES = 1_281_167
CROPS = ((3, 224, 224), (3, 227, 227))
"""Shapes of images of published trainings: 224 in papers, often 227 in the files of Caffe."""

PUBLISHED = {
    "resnet50": law_of(
        "75.9 % top-1",
        (
            (1632, 35.0, 1.118, 17),
            (3264, 35.2, 0.775, 15),
            (4096, 40.0, 1.054, 10),
            (8192, 42.0, 1.054, 10),
            (13056, 45.4, 0.699, 10),
            (32768, 56.0, 0.471, 10),
            (49152, 68.0, 0.667, 10),
            (58880, 79.9, 0.876, 10),
            (65536, 84.5, 0.972, 10),
            (67840, 85.857, 0.651, 28),
        ),
        "reference runs (LARS) in MLPerf Training's rcps_resnet.json, version 4.0",
    ),
    "googlenet": law_of(
        "68.3 % top-1, 88.7 % top-5",
        ((32, 64.0, None, 1), (1024, 72.0, None, 1)),
        "Iandola et al. 2016 (FireCaffe), table of GoogLeNet",
    ),
    "nin": law_of(
        "58.9 % top-1 at batch 256, 58.6 % at 1024",
        ((256, 47.0, None, 1), (1024, 47.0, None, 1)),
        "Iandola et al. 2016 (FireCaffe), table of NiN",
    ),
}


def epochs_law_of(workload: Workload) -> EpochsLaw | None:
    """Return the workload's law: the user's, or a published one for this network on ImageNet.

    A published law holds only for the network without arguments, and for shapes in CROPS.
    """
    if workload.epochs_law is not None:
        return workload.epochs_law
    is_imagenet = (workload.samples, workload.num_classes) == (IMAGENET_IMAGES, 1000)
    is_published = is_imagenet and getattr(workload.layout.inputs, "shape", None) in CROPS
    return PUBLISHED.get(workload.model) if is_published else None
