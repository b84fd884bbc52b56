"""Layers in stages of one worker each: how to cut them, the length of a step, and the memory.

Micro-batches follow each other through the stages. A step has m + K - 1 turns for m micro-batches
and K stages, each as long as the slowest stage, and a worker is idle in K - 1 of them (Huang et al.
2019, GPipe). Stage k, from 0, keeps activations of up to K - k micro-batches, by one forward, one
backward (Narayanan et al. 2019, PipeDream). Branches are treated as a sequence.

`turns` simulates a pipeline: a stage does its actions in order, each when its input has arrived,
and its port sends one message after the other while the stage computes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain as joined
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from firecaffe.exchange.schedule import BYTES_PER_ELEMENT
from firecaffe.parallel.stages import Action
from firecaffe.parallel.volumes import sum_numbers
from firecaffe.planner.chain import Unit
from firecaffe.planner.compute_time import data_s, update_s
from firecaffe.planner.layouts import LayerLayout
from firecaffe.planner.memory import memory_bytes
from firecaffe.planner.split_step import SplitCost, SplitStep, weights_bytes
from firecaffe.planner.step_cost import slowest_over_mean
from firecaffe.planner.worker_part import micro_batches_of

Array = NDArray[np.float64]


@dataclass(frozen=True)
class StagePlan:
    cuts: tuple[int, ...]
    """Stage k has the units from cuts[k] to cuts[k + 1]."""
    step: SplitStep
    """The slowest stage's step, with idle turns in its parts."""
    idle: float
    memory: dict[str, float]


def best_stages(cost: SplitCost, stages: int) -> StagePlan:
    """Find the cuts that minimize the slowest stage, including the transfer of its input.

    Raises: ValueError if there are fewer layers than stages, or the rows do not fit the links.
    """
    units = [unit for unit in cost.chain if unit.works]
    if stages > len(units):
        raise ValueError(f"{stages} stages of {len(units)} layers")
    layout = LayerLayout(cost.workers // stages, copies=stages)
    computes_s = np.array([cost.unit_s(unit, layout) for unit in units])
    passes_s = np.array([_passes_s(cost, stages, at) for at in range(len(units))]).T
    micro_batches = micro_batches_of(cost.work, layout)
    cuts = balanced(computes_s / micro_batches, passes_s)
    memory = [
        _memory(cost, units[start:stop], layout, min(micro_batches, stages - k))
        for k, (start, stop) in enumerate(pairwise(cuts))
    ]
    return StagePlan(
        cuts,
        _step(cost, units, layout, cuts, computes_s / micro_batches, passes_s),
        (stages - 1) / (micro_batches + stages - 1),
        max(memory, key=lambda by_purpose: sum(by_purpose.values())),
    )


def _step(
    cost: SplitCost,
    units: Sequence[Unit],
    layout: LayerLayout,
    cuts: tuple[int, ...],
    computes_s: Array,
    passes_s: Array,
) -> SplitStep:
    work, device = cost.work, cost.cluster.device
    parts = [*enumerate(pairwise(cuts))]
    own_s, passed_s = max(
        ((computes_s[start:stop].sum(), passes_s[k, start]) for k, (start, stop) in parts), key=sum
    )
    micro_batches = micro_batches_of(work, layout)
    turns = micro_batches + layout.model - 1
    weights = [sum(weights_bytes(unit, layout) for unit in units[a:b]) for _, (a, b) in parts]
    # Stages end in turn, the first one last; meanwhile the sums of the others are in flight.
    sums_s = cost.prices(layout.model).seconds([weight // BYTES_PER_ELEMENT for weight in weights])
    exposed_s = max(sum_s - k * own_s / 2 for k, sum_s in enumerate(sums_s))
    images = work.global_batch_size / layout.batch
    edges = [0.0, *(cost.itemsize * units[start].inputs * images for _, (start, _) in parts[1:])]
    sent = zip(weights, pairwise([*edges, 0.0]), strict=True)
    most = max(
        ((sum_numbers(layout.batch, weight_bytes), sum(ends)) for weight_bytes, ends in sent),
        key=sum,
    )
    waits = slowest_over_mean(cost.workers, device.jitter, micro_batches)
    return SplitStep(
        compute_s=turns * own_s * waits,
        stragglers_s=turns * own_s * (waits - 1),
        data_s=micro_batches * data_s(work, device),
        activations_s=turns * passed_s,
        exposed_communication_s=max(0.0, exposed_s),
        update_s=update_s(work, device, max(weights) / max(1, work.parameter_bytes)),
        gradients_bytes=most[0],
        activations_bytes=most[1],
    )


def _memory(
    cost: SplitCost, units: Sequence[Unit], layout: LayerLayout, kept: int
) -> dict[str, float]:
    works = tuple(joined.from_iterable(unit.works for unit in units))
    activations = sum(work.kept_bytes for work in works)
    stage = replace(cost.work, layers=works, activation_bytes=kept * activations)
    return memory_bytes(stage, layout.batch, is_whole=False)


def balanced(computes_s: Array, passes_s: Array) -> tuple[int, ...]:
    """Find the ends of consecutive parts, none empty, that minimize the slowest part.

    computes_s: of each unit. passes_s: to hand unit u's input to stage k, shape (stages, units).
    """
    stages, units = passes_s.shape
    before = np.concatenate([[0.0], computes_s.cumsum()])
    least = np.full((stages + 1, units + 1), np.inf)
    least[0, 0] = 0.0
    came = np.zeros((stages + 1, units + 1), dtype=int)
    for k in range(stages):
        # stage_s[a, b]: a stage of the units from a to b.
        stage_s = before[None, :] - before[:-1, None] + passes_s[k][:, None]
        stage_s[np.arange(units)[:, None] >= np.arange(units + 1)] = np.inf
        through = np.maximum(least[k, :-1, None], stage_s)
        came[k + 1], least[k + 1] = through.argmin(0), through.min(0)
    ends = [units]
    for k in range(stages, 0, -1):
        ends.append(int(came[k, ends[-1]]))
    return tuple(ends[::-1])


def _passes_s(cost: SplitCost, stages: int, at: int) -> list[float]:
    num_bytes = cost.itemsize * cost.chain[at].inputs * cost.work.micro_batch_size
    passes_s = [0.0]
    for k in range(1, stages):
        link = cost.network.link(k - 1, k)
        passes_s.append(2 * (link.latency_s + num_bytes / link.bandwidth_bytes_per_s))
    return passes_s


def turns(
    orders: Sequence[Sequence[Action]],
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    passes_s: Sequence[float],
    returns_s: Sequence[float],
) -> list[float]:
    """Simulate a pipeline, and return when each stage's last backward ends.

    orders: the actions of each stage, by `parallel.pipeline`. forward_s, backward_s: each stage's
    times for a micro-batch. passes_s, returns_s: each cut's times for a message with activations,
    and for one with gradients.
    """
    last = len(orders) - 1
    now_s, port_s = ([0.0] * len(orders) for _ in range(2))
    came_s: dict[tuple[int, Action], float] = {}
    left = [[*reversed(actions)] for actions in orders]

    def has(stage: int, action: Action) -> float | None:
        if stage == (0 if action.is_forward else last):
            return 0.0
        return came_s.get((stage, action))

    while any(left):
        for stage, actions in enumerate(left):
            while actions and (ready_s := has(stage, actions[-1])) is not None:
                action = actions.pop()
                taken_s = (forward_s if action.is_forward else backward_s)[stage]
                now_s[stage] = max(now_s[stage], ready_s) + taken_s
                other = stage + 1 if action.is_forward else stage - 1
                if 0 <= other <= last:
                    sent_s = passes_s[stage] if action.is_forward else returns_s[other]
                    port_s[stage] = max(port_s[stage], now_s[stage]) + sent_s
                    came_s[other, action] = port_s[stage]
    return now_s
