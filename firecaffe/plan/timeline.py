"""One step of one worker in time: micro-batches, buckets on their way while backward goes on.

Gradients become ready during the last micro-batch's backward, from the last layer to the first,
and travel in buckets, one after the other. What is still on its way when backward has finished is
exposed: the worker waits for it. A step ends with the slowest worker: where a worker's step varies
by `jitter` (a standard deviation, over the mean), P of them wait for the largest of P.

Source: the order statistic of a normal distribution by Blom 1958.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import NormalDist

from firecaffe.gradients.buckets import cut
from firecaffe.plan.compute import MicroBatch
from firecaffe.plan.workload import FLOAT_BYTES, Workload


@dataclass(frozen=True)
class Bucket:
    """When its gradients are ready, from the start of the last backward, and its float32."""

    ready_s: float
    num_elements: int


@dataclass(frozen=True)
class Step:
    """Where a step's time goes, in seconds."""

    compute_s: float
    """Forward and backward of this worker's micro-batches, and waiting for slower workers."""
    data_s: float
    exposed_communication_s: float
    update_s: float
    exchange_s: float
    """All buckets', hidden or not."""

    @property
    def step_s(self) -> float:
        return self.compute_s + self.data_s + self.exposed_communication_s + self.update_s


def buckets_of(workload: Workload, last: MicroBatch) -> list[Bucket]:
    """The buckets of a step, in the order in which they are sent."""
    ready = list(accumulate(last.backward_s))
    ready_of_tensor = [
        ready[index]
        for index, layer in enumerate(reversed(workload.layers))
        for _ in layer.parameters_bytes
    ]
    sizes = workload.tensors_bytes
    return [
        Bucket(ready_of_tensor[stop - 1], sum(sizes[start:stop]) // FLOAT_BYTES)
        for start, stop in cut(sizes, workload.bucket_bytes)
    ]


def exposed_s(
    buckets: Sequence[Bucket],
    exchange_s: Sequence[float],
    backward_s: float,
    share: float = 1.0,
) -> float:
    """What is left of the exchange when backward has finished.

    share: of its own time that a bucket takes while one like it is under way with it. Two that
    differ are under way together for the shorter one's time, and not before both are ready.
    """
    free_s = 0.0
    for index, (bucket, taken_s) in enumerate(zip(buckets, exchange_s, strict=True)):
        free_s = max(free_s, bucket.ready_s) + taken_s
        if index + 1 < len(buckets):
            together_s = min(taken_s, exchange_s[index + 1], free_s - buckets[index + 1].ready_s)
            free_s -= (1 - share) * max(0.0, together_s)
    return max(0.0, free_s - backward_s)


def slowest_of(world_size: int, jitter: float) -> float:
    """How many times a worker's mean the slowest of so many is expected to take."""
    if world_size == 1:
        return 1.0
    return 1 + jitter * NormalDist().inv_cdf((world_size - 0.375) / (world_size + 0.25))
