"""Laws of epochs against batch from published trainings on ImageNet, by the network's name."""

from firecaffe.planner.epochs_law import EpochsLaw, law_of
from firecaffe.planner.workload import Workload

IMAGENET_IMAGES = 1_281_167

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
    """Return the workload's law: the user's, or a published one for this network on ImageNet."""
    is_imagenet = (workload.samples, workload.num_classes) == (IMAGENET_IMAGES, 1000)
    return workload.epochs_law or (PUBLISHED.get(workload.model) if is_imagenet else None)
