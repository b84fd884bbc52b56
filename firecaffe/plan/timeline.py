"""One step of one worker in time: micro-batches, buckets on their way while backward goes on.

Gradients become ready during the last micro-batch's backward, from the last layer to the first,
and travel in buckets, in this order. What is still on its way when backward has finished is
exposed: the worker waits for it. What goes on beside backward may slow it down: messages take the
processor. A step ends with the slowest worker: if micro-batches vary by
`jitter` (a standard deviation, over the mean), each for itself, P workers wait for the largest of P
sums.

Source: the order statistic of a normal distribution by Blom 1958.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf, sqrt
from statistics import NormalDist

from firecaffe.exchange.choose import BYTES_PER_ELEMENT
from firecaffe.gradients.buckets import cut
from firecaffe.plan.compute import MicroBatch
from firecaffe.plan.workload import Workload


@dataclass(frozen=True)
class Bucket:
    """When its gradients are ready, from the start of the last backward, and its float32."""

    ready_s: float
    num_elements: int


@dataclass(frozen=True)
class Step:
    """The parts of a step's time, in seconds."""

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
        Bucket(ready_of_tensor[stop - 1], sum(sizes[start:stop]) // BYTES_PER_ELEMENT)
        for start, stop in cut(sizes, workload.bucket_bytes)
    ]


def overlap(
    buckets: Sequence[Bucket],
    exchange_s: Sequence[float],
    backward_s: float,
    lanes: int = 1,
    share: float = 1.0,
    slowdown: float = 0.0,
) -> tuple[float, float]:
    """What backward takes beside the exchange, and what is left of the exchange then, in seconds.

    lanes: so many buckets may be under way at once, if they are ready. share: what these take,
    over what they would take one after the other. slowdown: how much longer backward takes, as a
    share of its time, while anything is under way.
    """
    now_s = done_s = 0.0  # the clock; how far backward is, of its own time
    waiting = deque(zip(buckets, exchange_s, strict=True))
    left_s: list[float] = []  # of those under way, as if each were alone
    ended_s = 0.0
    while waiting or left_s or done_s < backward_s:
        goal_s = backward_s
        if waiting and len(left_s) < lanes:
            goal_s = min(waiting[0][0].ready_s, backward_s)
            if done_s >= goal_s:
                left_s.append(waiting.popleft()[1])
                continue
        stretch = 1 + slowdown if left_s else 1.0
        together = share if len(left_s) > 1 else 1.0
        computes_s = (goal_s - done_s) * stretch if done_s < backward_s else inf
        sends_s = min(left_s) * len(left_s) * together if left_s else inf
        passed_s = min(computes_s, sends_s)
        now_s += passed_s
        if left_s:
            # Whoever comes to its end is taken out as such: rounding would leave a little of it.
            sent_s = min(left_s) if passed_s == sends_s else passed_s / len(left_s) / together
            left_s = [s - sent_s for s in left_s if s > sent_s]
        if done_s < backward_s:
            done_s = goal_s if passed_s == computes_s else min(goal_s, done_s + passed_s / stretch)
            ended_s = now_s
    return ended_s, now_s - ended_s


def slowest_of(world_size: int, jitter: float, micro_batches: float) -> float:
    """How many times a worker's mean the slowest of so many is expected to take.

    micro_batches: of each worker in a step.
    """
    if world_size == 1:
        return 1.0
    largest = NormalDist().inv_cdf((world_size - 0.375) / (world_size + 0.25))
    return 1 + jitter / sqrt(micro_batches) * largest
