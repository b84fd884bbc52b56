"""What one worker computes and holds of a network whose layers are shared in some layouts."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain as joined
from math import ceil

from firecaffe.exchange.choose import BYTES_PER_ELEMENT
from firecaffe.plan.chain import Unit
from firecaffe.plan.in_parts import by_paths, by_rows, seen_bytes
from firecaffe.plan.layouts import Layout
from firecaffe.plan.memory import beside_micro_batch, memory_bytes
from firecaffe.plan.update import update_of
from firecaffe.plan.workload import LayerWork, Workload

Layouts = Sequence[Layout]
"""One for each unit of a chain."""


def micro_batches_of(work: Workload, layout: Layout) -> int:
    """Micro-batches of a step that a worker has a part in."""
    return ceil(work.num_micro_batches / layout.batch)


def part_of(unit: Unit, layout: Layout) -> tuple[LayerWork, ...]:
    """A worker's part of a unit, for one of the images that it has a part in: the largest, if the
    parts are not equal.
    """
    if layout.rows > 1:
        return by_rows(unit, layout)
    if layout.paths > 1:
        return by_paths(unit, layout)
    if layout.parts == 1:
        return unit.works
    out = _share(unit.output_elements, layout.outputs) * _share(unit.group_elements, layout.groups)
    into = _share(unit.input_elements, layout.inputs)
    taken = into * _share(unit.group_elements, layout.groups)
    return tuple(_part(each, layout, out, into, taken) for each in unit.works)


def _share(elements: int, workers: int) -> float:
    return ceil(elements / workers) / elements


def _part(work: LayerWork, layout: Layout, out: float, into: float, taken: float) -> LayerWork:
    """out: the share of the outputs. into: of the inputs that a weight matrix has. taken: of those
    that the layer is given.
    """
    if not work.shapes:  # what goes on with the layer's parts
        return replace(
            work, moved_bytes=work.moved_bytes * out, output_bytes=work.output_bytes * out
        )
    inputs_bytes = work.moved_bytes - work.output_bytes
    return replace(
        work,
        flops=work.flops * out * into,
        moved_bytes=inputs_bytes * taken + work.output_bytes * out,
        weight_bytes=work.weight_bytes * out * into,
        shapes=tuple(_cut(shape, out, into) for shape in work.shapes),
        output_bytes=work.output_bytes * out,
    )


def _cut(shape: tuple[int, ...], out: float, into: float) -> tuple[int, ...]:
    """Outputs are the first dimension and inputs the second; a bias has no inputs."""
    first = round(shape[0] * out)
    return (first,) if len(shape) == 1 else (first, round(shape[1] * into), *shape[2:])


def rank_work(work: Workload, chain: Sequence[Unit], layouts: Layouts) -> Workload:
    """The workload as one worker has it: its parts of the layers.

    Activations are those of a round, in which each worker computes one micro-batch of the units
    that most workers share by batch, and as many of the others as there are then. What was gathered
    for a unit whose outputs are shared is kept for its backward, and so is what parts of rows see.
    """
    most = max(each.batch for each in layouts)
    parts = [part_of(unit, layout) for unit, layout in zip(chain, layouts, strict=True)]
    kept = 0.0
    for unit, part, layout in zip(chain, parts, layouts, strict=True):
        own = sum(each.output_bytes for each in part if each.backward_share > 0)
        if layout.in_parts.rows > 1:
            own += seen_bytes(unit, layout)
        elif layout.paths > 1:
            own += BYTES_PER_ELEMENT * unit.inputs
        elif layout.outputs > 1:
            own += next(each.moved_bytes - each.output_bytes for each in part if each.shapes)
        kept += own * most / layout.batch
    return replace(work, layers=tuple(joined.from_iterable(parts)), activation_bytes=kept)


def updated_bytes(work: Workload, chain: Sequence[Unit], layouts: Layouts) -> float:
    """The weights that a worker updates, at most. What is apart each updates that holds it; the
    rest may be shared out by those that share its batch: parts whole, for they need not be rows.
    """
    most = max(each.batch for each in layouts)
    parts = [part_of(*each) for each in zip(chain, layouts, strict=True)]
    apart, shared = list[LayerWork](), list[LayerWork]()
    for layout, part in zip(layouts, parts, strict=True):
        (apart if is_apart(layout, most) else shared).extend(part)
    is_cut = any(each.parts * each.rows * each.paths > 1 for each in layouts)
    whole = work.has_whole_shards or is_cut
    rest = replace(work, layers=tuple(shared), has_whole_shards=whole)
    own = sum((sum(each.parameters_bytes) for each in apart), 0.0)
    return own + float(update_of(work, most).updated_bytes(rest, most))


def memory_of(
    work: Workload, chain: Sequence[Unit], layouts: Layouts, in_memory: int = 1
) -> dict[str, float]:
    """Bytes of one worker by what they are for, as `plan.memory` counts them. in_memory: as there,
    for the layers that all workers share by batch.
    """
    own = rank_work(work, chain, layouts)
    is_whole = not any(each.parts * each.rows > 1 or each.computed for each in layouts)
    parts = memory_bytes(own, 1)
    most = max(each.batch for each in layouts)
    sums = running = shared = 0.0
    for unit, layout in zip(chain, layouts, strict=True):
        share = micro_batches_of(work, layout)
        weights = sum(sum(each.parameters_bytes) for each in part_of(unit, layout))
        if is_apart(layout, most):
            # A tree for each of those whose micro-batches it is given (`updates.part_sums`),
            # with what the running ones have made.
            leaves = ceil(work.num_micro_batches / most)
            sums += weights * most / layout.batch * leaves.bit_length()
            continue
        sums += weights * max(0, share.bit_length() - 1)
        running += weights
        if in_memory > 1 and layout.model == 1:
            shared += weights
    largest = max(work.bucket_bytes, max(own.tensors_bytes, default=0))
    arrives = shared * (in_memory - 1) / in_memory + 2.0 * min(largest, running - shared)
    updated = updated_bytes(work, chain, layouts)
    optimizer = updated * work.optimizer_vectors
    found = parts | {"sums": sums, "running": running, "buckets": arrives, "optimizer": optimizer}
    copied = found["parameters"] + found["optimizer"]
    made = updated * work.update_vectors
    return beside_micro_batch(found | {"saving": copied if is_whole else 0.0, "updating": made})


def is_apart(layout: Layout, most: int) -> bool:
    """Whether a worker has parts of a layer that is given the micro-batches of several workers:
    their gradients are kept apart, and summed after backward. most: workers that share the batch of
    the layers that most do.
    """
    return layout.parts > 1 and layout.batch < most


def nodes_of(layout: Layout, most: int) -> int:
    """The nodes of the tree that a worker has of a step's gradients: one for each worker whose
    micro-batches it is given. most: as of `is_apart`.
    """
    return most // layout.batch if is_apart(layout, most) else 1


def widest(memory: dict[str, float], device_bytes: float) -> float:
    """How many times as wide all layers may be, so that a worker's memory just suffices.

    The weights of layers that are w times as wide are w² as many, but for the first one's inputs
    and the last one's outputs; their activations are w times as many. 0 if nothing fits.
    """
    of_weights = sum(memory[word] for word in WEIGHTS)
    room = device_bytes - memory["library"]
    half = memory["activations"] / 2
    if room <= 0:
        return 0.0
    return float((half**2 + of_weights * room) ** 0.5 - half) / of_weights if of_weights else 0.0


WEIGHTS = (
    "parameters",
    "gradients",
    "running",
    "sums",
    "optimizer",
    "buckets",
    "saving",
    "updating",
)
