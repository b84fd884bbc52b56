"""How many epochs a network needs at a batch size: published points, used only between them.

A larger batch makes fewer and better steps; beyond what the noise of the gradients allows, more
epochs are needed. Between two published batch sizes the epochs are straight in the batch size's
logarithm, and outside their range nothing is said.
"""

from dataclasses import dataclass
from math import log

import numpy as np

IMAGENET_IMAGES = 1_281_167


@dataclass(frozen=True)
class Law:
    """Epochs against global batch size, for one network on ImageNet-1k."""

    target: str
    epochs: dict[int, float]
    source: str

    def epochs_at(self, global_batch_size: int) -> float | None:
        """None outside the published range."""
        sizes = sorted(self.epochs)
        if not sizes[0] <= global_batch_size <= sizes[-1]:
            return None
        points = [log(size) for size in sizes]
        found = np.interp(log(global_batch_size), points, [self.epochs[size] for size in sizes])
        return float(found)


LAWS = {
    "resnet50": Law(
        "75.9 % top-1",
        {
            1632: 35.0,
            3264: 35.2,
            4096: 40.0,
            8192: 42.0,
            13056: 45.4,
            32768: 56.0,
            35840: 60.0,
            49152: 68.0,
            58880: 79.9,
            65536: 84.5,
        },
        "means of the reference runs (LARS) in MLPerf Training's rcps_resnet.json, version 2.0",
    ),
    "googlenet": Law(
        "68.3 % top-1, 88.7 % top-5",
        {32: 64.0, 1024: 72.0},
        "Iandola et al. 2016 (FireCaffe), table of GoogLeNet",
    ),
    "nin": Law(
        "58.9 % top-1 at batch 256, 58.6 % at 1024",
        {256: 47.0, 1024: 47.0},
        "Iandola et al. 2016 (FireCaffe), table of NiN",
    ),
}
