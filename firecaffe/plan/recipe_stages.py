"""The stages that a recipe names: what each computes, what goes between them, what a step takes."""

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
from firecaffe.models.config import ModelConfig
from firecaffe.models.network import with_outline
from firecaffe.parallel.pipeline import ORDERS, Action, most_held
from firecaffe.parallel.stages import cut_stages
from firecaffe.parallel.volumes import sum_numbers
from firecaffe.plan.cluster import Device
from firecaffe.plan.compute import MicroBatch, correction, data_s, layer_s, update_s
from firecaffe.plan.held import micro_batches_of, part_of
from firecaffe.plan.layouts import Layout
from firecaffe.plan.memory import memory_bytes
from firecaffe.plan.split_step import SplitCost, SplitStep
from firecaffe.plan.stages import turns
from firecaffe.plan.step_cost import buckets_of, overlap, slowest_of
from firecaffe.plan.workload import PROFILED_IMAGES, LayerWork, Workload, on_zeros

STATE_BYTES = 5056
"""The state of torch's generator on a CPU, which goes along with each micro-batch."""


@dataclass(frozen=True)
class Crossing:
    """Numbers of one sample that go from a stage to the next one."""

    forward: float
    backward: float
    """Of those, the ones whose gradients come back."""

    def shared(self, share: float) -> Self:
        """What each of several workers sends of it."""
        return replace(self, forward=share * self.forward, backward=share * self.backward)


@dataclass(frozen=True)
class RecipeStages:
    """A step in these stages."""

    step: SplitStep
    """Compute is the stage's that computes longest; activations, what a step takes besides until
    all stages are through: for the stages before and behind, and for messages."""
    computes_s: tuple[float, ...]
    """Of each stage, in a step."""
    memory: dict[str, float]
    """Of the stage that holds most, in bytes."""
    memory_by_stage: tuple[float, ...]

    @property
    def idle(self) -> float:
        """The share of a step in which a worker does not compute, on average."""
        return 1 - sum(self.computes_s) / len(self.computes_s) / self.step.step_s


def crossings_of(config: ModelConfig, work: Workload, names: Sequence[str]) -> list[Crossing]:
    """What goes over each cut; found on the meta device.

    Raises: RecipeError if the network cannot be cut so; as `plan.workload.layers_of`.
    """

    def find(network: nn.Module, inputs: Any) -> list[Crossing]:
        stages = cut_stages(network.train(), names)
        values, found = (inputs,), []
        with without_compiler():
            for stage in stages[:-1]:
                values = stage.module(*values)
                given = [each for each in tree_leaves(values) if isinstance(each, Tensor)]
                wanted = [each for each in given if each.requires_grad]
                sizes = (sum(each.numel() for each in those) for those in (given, wanted))
                found.append(Crossing(*(size / PROFILED_IMAGES for size in sizes)))
        return found

    return with_outline(
        config,
        work.num_classes or None,
        work.layout.channels,
        lambda network: on_zeros(config, network, work.layout, PROFILED_IMAGES, find),
    )


def works_of(works: Sequence[LayerWork], names: Sequence[str]) -> list[tuple[LayerWork, ...]]:
    """The calls of each stage. A stage begins with the first call in the module that it names.

    Raises: ValueError if a module is not called.
    """
    begins = [0]
    for name in names:
        own = (each.name.partition("#")[0] for each in works)
        place = next((at for at, each in enumerate(own) if f"{each}.".startswith(f"{name}.")), None)
        if place is None:
            raise ValueError(f"{name} is not called")
        begins.append(place)
    return [tuple(works[start:stop]) for start, stop in pairwise([*begins, len(works)])]


@dataclass(frozen=True)
class StageWork:
    """What a worker computes of a stage."""

    layers: tuple[LayerWork, ...]
    forward_s: float
    """Of a micro-batch."""
    backward_s: tuple[float, ...]
    """Of each layer, from the first to the last."""
    between_s: float = 0.0
    """Of a micro-batch's exchanges between the workers of the stage, in forward and backward."""
    between_bytes: float = 0.0
    """What each of them sends for that in a step."""
    share_sent: float = 1.0
    """The share of what goes to the next stage that each of them sends."""


def whole_stages(work: Workload, device: Device, names: Sequence[str]) -> list[StageWork]:
    """Stages of a worker each. Raises: ValueError as `works_of`."""
    scale = correction(work, device, work.micro_batch_size)
    found = []
    for own in works_of(work.layers, names):
        times = [layer_s(each, work, device, work.micro_batch_size) for each in own]
        forward_s = scale * sum(forward for forward, _ in times)
        found.append(StageWork(own, forward_s, tuple(scale * backward for _, backward in times)))
    return found


def split_stages(
    cost: SplitCost, layouts: Sequence[Layout], names: Sequence[str]
) -> list[StageWork]:
    """Stages of as many workers as a layout has, of which some layers are split. cost: of the
    workers that hold one stage, of all models. layouts: of the units of its chain.

    Raises: ValueError as `works_of`.
    """
    parts = [part_of(*each) for each in zip(cost.chain, layouts, strict=True)]
    ends = [*accumulate(map(len, works_of([*joined.from_iterable(parts)], names)))]
    begins = accumulate(map(len, parts), initial=0)
    # The last unit has no layer: it makes the network's outputs whole.
    numbers = [min(bisect_right(ends, each), len(ends) - 1) for each in begins]
    most = max(each.batch for each in layouts)
    found = [StageWork((), 0.0, ()) for _ in ends]
    for at, (unit, layout, part) in enumerate(zip(cost.chain, layouts, parts, strict=True)):
        forward_s, backward_s = cost.computes_s(unit, layout)
        between = [cost.inside(unit, layout, most)]
        if at:  # what comes from the stage before is as it was left there
            between.append(cost.between(at - 1, layouts[at - 1], layout))
        step_s, sent_bytes = map(sum, zip(*between, strict=True))
        stage = found[numbers[at]]
        found[numbers[at]] = StageWork(
            stage.layers + part,
            stage.forward_s + forward_s,
            stage.backward_s + backward_s,
            stage.between_s + step_s / micro_batches_of(cost.work, layout),
            stage.between_bytes + sent_bytes,
            1 / (layout.outputs * layout.groups * layout.rows),
        )
    return found


def stages_step(
    cost: SplitCost,
    crossings: Sequence[Crossing],
    stages: Sequence[StageWork],
    pipeline: str,
    model: int = 1,
) -> RecipeStages:
    """cost: of all workers; its chain is not asked for. pipeline: a row of `ORDERS`. model: workers
    of each stage.

    Raises: ValueError if rows of workers do not fit the links.
    """
    work, device = cost.work, cost.cluster.device
    size, row = len(stages), len(stages) * model
    layout = Layout(cost.workers // row, copies=row)
    rounds = micro_batches_of(work, layout)
    crossed = [each.shared(own.share_sent) for each, own in zip(crossings, stages, strict=False)]
    forward_s = [own.forward_s + own.between_s / 2 for own in stages]
    backward_s = [sum(own.backward_s) + own.between_s / 2 for own in stages]
    fetch_s = data_s(work, device)
    orders = [ORDERS[pipeline](size, rounds, stage) for stage in range(size)]
    found = turns(
        orders,
        [seconds + fetch_s * (k in (0, size - 1)) for k, seconds in enumerate(forward_s)],
        backward_s,
        [_message_s(cost, k, model, each.forward, True) for k, each in enumerate(crossed)],
        [_message_s(cost, k, model, each.backward, False) for k, each in enumerate(crossed)],
    )
    of_stages = [replace(work, layers=own.layers) for own in stages]
    backwards = [own.backward_s[::-1] for own in stages]
    weights = [own.parameter_bytes for own in of_stages]
    updated = max(cost.update.updated_bytes(own, layout.batch) for own in of_stages)
    sums_s = list(map(partial(_sums_s, cost, row), of_stages, backwards))
    length_s = max(found.ends_s)
    summed_s = max(end + own for end, own in zip(found.ends_s, sums_s, strict=True))
    computes_s = [rounds * (a + b) for a, b in zip(forward_s, backward_s, strict=True)]
    waits = slowest_of(cost.workers, device.jitter, rounds)
    held = [_held(*each) for each in zip(of_stages, orders, strict=True)]
    memory = [memory_bytes(each, layout.batch, is_whole=False) for each in held]
    own_bytes = zip(_sent(cost, crossed, layout), stages, strict=True)
    sent = [each + own.between_bytes for each, own in own_bytes]
    gradients, sent_between = max(
        zip((sum_numbers(layout.batch, own) for own in weights), sent, strict=True), key=sum
    )
    step = SplitStep(
        compute_s=max(computes_s) * waits,
        data_s=rounds * fetch_s,
        activations_s=max(0.0, (length_s - max(computes_s)) * waits - rounds * fetch_s),
        exposed_communication_s=max(0.0, summed_s - length_s),
        update_s=update_s(work, device, updated / max(1, work.parameter_bytes)),
        gradients_bytes=gradients,
        activations_bytes=sent_between,
    )
    return RecipeStages(
        step,
        tuple(computes_s),
        max(memory, key=lambda each: sum(each.values())),
        tuple(sum(each.values()) for each in memory),
    )


def _held(stage: Workload, actions: Sequence[Action]) -> Workload:
    """A stage as its worker holds it: with the activations of all micro-batches between their
    forward and their backward.
    """
    activations = sum(each.output_bytes for each in stage.layers if each.backward_share > 0)
    return replace(stage, activation_bytes=most_held(actions) * activations)


def _sums_s(cost: SplitCost, row: int, stage: Workload, backward: tuple[float, ...]) -> float:
    """Seconds by which the sums of a stage's gradients make its last backward longer. row: the
    workers that hold one model. backward: of its layers, from the last to the first.
    """
    slowdown = cost.cluster.device.exchange_slowdown
    buckets = buckets_of(stage, MicroBatch(0.0, backward))
    whole_s = cost.prices(row).seconds([each.num_elements for each in buckets])
    taken_s = [each * cost.update.share_before for each in whole_s]
    slowed_s, exposed_s = overlap(buckets, taken_s, sum(backward), slowdown=slowdown)
    back_s = sum(whole_s) - sum(taken_s)
    return slowed_s - sum(backward) + exposed_s + back_s


def _message_s(cost: SplitCost, cut: int, model: int, numbers: float, has_state: bool) -> float:
    num_bytes = cost.itemsize * numbers * cost.work.micro_batch_size + STATE_BYTES * has_state
    link = cost.network.link(cut * model, (cut + 1) * model)
    return link.latency_s + num_bytes / link.bandwidth_bytes_per_s


def _sent(cost: SplitCost, crossings: Sequence[Crossing], layout: Layout) -> list[float]:
    """Bytes of activations and their gradients that each stage sends in a step."""
    images = cost.itemsize * cost.work.global_batch_size / layout.batch
    forward = [*(images * each.forward for each in crossings), 0.0]
    backward = [0.0, *(images * each.backward for each in crossings)]
    return [a + b for a, b in zip(forward, backward, strict=True)]
