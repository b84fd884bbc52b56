"""The stages that a recipe names: their work, the messages between them, and their step."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from itertools import chain as joined
from typing import Any, Self

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from firecaffe.meta_kernels import without_compiler
from firecaffe.models import ModelConfig
from firecaffe.parallel.stages import ORDERS, Action, cut_stages, most_held
from firecaffe.parallel.volumes import sum_numbers
from firecaffe.planner.boundary_cost import Communication
from firecaffe.planner.cluster import Device
from firecaffe.planner.compute_time import MicroBatch, correction, data_s, layers_s, update_s
from firecaffe.planner.layouts import LayerLayout
from firecaffe.planner.memory import memory_bytes
from firecaffe.planner.split_step import SplitCost, SplitStep
from firecaffe.planner.stage_times import turns
from firecaffe.planner.step_cost import buckets_of, overlap, slowest_over_mean
from firecaffe.planner.worker_part import micro_batches_of, part_of
from firecaffe.planner.workload import PROFILED_IMAGES, LayerWork, Workload, on_outline

STATE_BYTES = 5056
"""The state of torch's CPU generator, which is sent with each micro-batch."""


@dataclass(frozen=True)
class Crossing:
    """Numbers of one sample that go from a stage to the next one."""

    forward: float
    backward: float
    """The part of `forward` whose gradients are sent back."""

    def shared(self, share: float) -> Self:
        return replace(self, forward=share * self.forward, backward=share * self.backward)


@dataclass(frozen=True)
class RecipeStages:
    step: SplitStep
    """compute_s is the slowest stage's; activations_s is the rest until all stages are done."""
    computes_s: tuple[float, ...]
    memory: dict[str, float]

    @property
    def idle(self) -> float:
        """The mean share of a step in which a worker does not compute."""
        return 1 - sum(self.computes_s) / len(self.computes_s) / self.step.step_s


def crossings_of(config: ModelConfig, work: Workload, names: Sequence[str]) -> list[Crossing]:
    """Find what crosses each cut. Raises: RecipeError for an impossible cut; as `layers_of`."""

    def find(network: nn.Module, inputs: Any) -> list[Crossing]:
        stages = cut_stages(network.train(), names)
        values, crossings = (inputs,), []
        with without_compiler():
            for stage in stages[:-1]:
                values = stage.module(*values)
                given = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
                wanted = [tensor for tensor in given if tensor.requires_grad]
                sizes = (sum(tensor.numel() for tensor in those) for those in (given, wanted))
                crossings.append(Crossing(*(size / PROFILED_IMAGES for size in sizes)))
        return crossings

    return on_outline(config, work.layout, work.num_classes or None, find)


def works_of(works: Sequence[LayerWork], names: Sequence[str]) -> list[tuple[LayerWork, ...]]:
    """Split calls into stages at each module's first call. Raises: ValueError if not called."""
    begins = [0]
    for name in names:
        calls = (work.name.partition("#")[0] for work in works)
        place = next(
            (at for at, call in enumerate(calls) if f"{call}.".startswith(f"{name}.")), None
        )
        if place is None:
            raise ValueError(f"{name} is not called")
        begins.append(place)
    return [tuple(works[start:stop]) for start, stop in pairwise([*begins, len(works)])]


@dataclass(frozen=True)
class StageWork:
    """The work of one worker of a stage."""

    layers: tuple[LayerWork, ...]
    forward_s: float
    backward_s: tuple[float, ...]
    """Seconds of each layer, from the first to the last."""
    between_s: float = 0.0
    """Seconds of a micro-batch's exchanges among the stage's workers, forward and backward."""
    between_bytes: float = 0.0
    share_sent: float = 1.0
    """Each worker's share of what the stage sends to the next one."""


def whole_stages(work: Workload, device: Device, names: Sequence[str]) -> list[StageWork]:
    """Stages of one worker each. Raises: ValueError, as `works_of`."""
    scale = correction(work, device, work.micro_batch_size)
    return [
        StageWork(layers, *layers_s(layers, work, device, work.micro_batch_size, scale))
        for layers in works_of(work.layers, names)
    ]


def split_stages(
    cost: SplitCost, layouts: Sequence[LayerLayout], names: Sequence[str]
) -> list[StageWork]:
    """Stages of several workers, over which some layers are split.

    cost: that of all workers, in all models, that hold one stage. layouts: those of its chain's
    units. Raises: ValueError, as `works_of`.
    """
    parts = [part_of(*pair) for pair in zip(cost.chain, layouts, strict=True)]
    ends = [*accumulate(map(len, works_of([*joined.from_iterable(parts)], names)))]
    begins = accumulate(map(len, parts), initial=0)
    # The last unit has no layer; it makes the network's outputs whole.
    numbers = [min(bisect_right(ends, begin), len(ends) - 1) for begin in begins]
    most = max(layout.batch for layout in layouts)
    stages = [StageWork((), 0.0, ()) for _ in ends]
    for at, (unit, layout, part) in enumerate(zip(cost.chain, layouts, parts, strict=True)):
        forward_s, backward_s = cost.computes_s(unit, layout)
        between = [cost.inside(unit, layout, most)]
        if at:  # activations arrive in the layout of the unit before
            between.append(cost.between(at - 1, layouts[at - 1], layout))
        step_s, sent_bytes = Communication.in_sequence(between)
        stage = stages[numbers[at]]
        stages[numbers[at]] = StageWork(
            stage.layers + part,
            stage.forward_s + forward_s,
            stage.backward_s + backward_s,
            stage.between_s + step_s / micro_batches_of(cost.work, layout),
            stage.between_bytes + sent_bytes,
            1 / (layout.outputs * layout.groups * layout.rows),
        )
    return stages


def stages_step(
    cost: SplitCost,
    crossings: Sequence[Crossing],
    stages: Sequence[StageWork],
    pipeline: str,
    model: int = 1,
) -> RecipeStages:
    """Price a step in stages. Raises: ValueError if rows of workers do not fit the links.

    cost: that of all workers; its chain is not used. pipeline: a row of `ORDERS`. model: workers of
    each stage.
    """
    work, device = cost.work, cost.cluster.device
    size, row = len(stages), len(stages) * model
    layout = LayerLayout(cost.workers // row, copies=row)
    rounds = micro_batches_of(work, layout)
    pairs = zip(crossings, stages, strict=False)
    crossed = [crossing.shared(stage.share_sent) for crossing, stage in pairs]
    forward_s = [stage.forward_s + stage.between_s / 2 for stage in stages]
    backward_s = [sum(stage.backward_s) + stage.between_s / 2 for stage in stages]
    fetch_s = data_s(work, device)
    orders = [ORDERS[pipeline](size, rounds, stage) for stage in range(size)]
    ends_s = turns(
        orders,
        [seconds + fetch_s * (k in (0, size - 1)) for k, seconds in enumerate(forward_s)],
        backward_s,
        [_message_s(cost, k, model, cut.forward, True) for k, cut in enumerate(crossed)],
        [_message_s(cost, k, model, cut.backward, False) for k, cut in enumerate(crossed)],
    )
    of_stages = [replace(work, layers=stage_work.layers) for stage_work in stages]
    backwards = [stage_work.backward_s[::-1] for stage_work in stages]
    weights = [workload.parameter_bytes for workload in of_stages]
    updated = max(cost.update.updated_bytes(workload, layout.batch) for workload in of_stages)
    sums_s = list(map(partial(_sums_s, cost, row), of_stages, backwards))
    length_s = max(ends_s)
    summed_s = max(end + sum_s for end, sum_s in zip(ends_s, sums_s, strict=True))
    computes_s = [rounds * (a + b) for a, b in zip(forward_s, backward_s, strict=True)]
    waits = slowest_over_mean(cost.workers, device.jitter, rounds)
    held = [_held(*pair) for pair in zip(of_stages, orders, strict=True)]
    memory = [memory_bytes(workload, layout.batch, is_whole=False) for workload in held]
    in_bytes = zip(_sent(cost, crossed, layout), stages, strict=True)
    sent = [crossing_bytes + stage.between_bytes for crossing_bytes, stage in in_bytes]
    sums = (sum_numbers(layout.batch, weight_bytes) for weight_bytes in weights)
    gradients, sent_between = max(zip(sums, sent, strict=True), key=sum)
    step = SplitStep(
        compute_s=max(computes_s) * waits,
        stragglers_s=max(computes_s) * (waits - 1),
        data_s=rounds * fetch_s,
        activations_s=max(0.0, (length_s - max(computes_s)) * waits - rounds * fetch_s),
        exposed_communication_s=max(0.0, summed_s - length_s) + cost.network.agreement_s(row),
        update_s=update_s(work, device, updated / max(1, work.parameter_bytes)),
        gradients_bytes=gradients,
        activations_bytes=sent_between,
    )
    most = max(memory, key=lambda by_purpose: sum(by_purpose.values()))
    return RecipeStages(step, tuple(computes_s), most)


def _held(stage: Workload, actions: Sequence[Action]) -> Workload:
    """The stage with activations of all micro-batches between their forward and backward."""
    activations = sum(layer.kept_bytes for layer in stage.layers)
    return replace(stage, activation_bytes=most_held(actions) * activations)


def _sums_s(cost: SplitCost, row: int, stage: Workload, backward: tuple[float, ...]) -> float:
    """Seconds that gradients' sums add to a last backward. backward: by layer, the last first."""
    slowdown = cost.cluster.device.exchange_slowdown
    buckets = buckets_of(stage, MicroBatch(0.0, backward))
    whole_s = cost.prices(row).seconds([bucket.num_elements for bucket in buckets])
    taken_s = [seconds * cost.update.share_before for seconds in whole_s]
    slowed_s, exposed_s = overlap(buckets, taken_s, sum(backward), slowdown=slowdown)
    back_s = sum(whole_s) - sum(taken_s)
    return slowed_s - sum(backward) + exposed_s + back_s


def _message_s(cost: SplitCost, cut: int, model: int, numbers: float, has_state: bool) -> float:
    num_bytes = cost.itemsize * numbers * cost.work.micro_batch_size + STATE_BYTES * has_state
    link = cost.network.link(cut * model, (cut + 1) * model)
    return link.latency_s + num_bytes / link.bandwidth_bytes_per_s


def _sent(cost: SplitCost, crossings: Sequence[Crossing], layout: LayerLayout) -> list[float]:
    images = cost.itemsize * cost.work.global_batch_size / layout.batch
    forward = [*(images * crossing.forward for crossing in crossings), 0.0]
    backward = [0.0, *(images * crossing.backward for crossing in crossings)]
    return [a + b for a, b in zip(forward, backward, strict=True)]
