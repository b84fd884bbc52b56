"""A worker's part of a network whose units have layouts: its work and its memory."""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from firecaffe.exchange.choose import BYTES_PER_ELEMENT
from firecaffe.planner.chain import Unit
from firecaffe.planner.in_parts import by_paths, by_rows, kept_by_rows
from firecaffe.planner.layouts import Layout
from firecaffe.planner.memory import beside_micro_batch, evaluating_bytes, memory_bytes
from firecaffe.planner.update_price import update_of
from firecaffe.planner.workload import LayerWork, Workload

Layouts = Sequence[Layout]
"""One layout for each unit of a chain."""


def micro_batches_of(work: Workload, layout: Layout) -> int:
    """The number of micro-batches of a step that a worker takes part in."""
    return ceil(work.num_micro_batches / layout.batch)


def part_of(unit: Unit, layout: Layout) -> tuple[LayerWork, ...]:
    """A worker's part of a unit, for one image; the largest part if they are not equal."""
    if layout.rows > 1:
        return by_rows(unit, layout)
    if layout.paths > 1:
        return by_paths(unit, layout)
    if layout.parts == 1:
        return unit.works
    out = _share(unit.output_elements, layout.outputs) * _share(unit.group_elements, layout.groups)
    into = _share(unit.input_elements, layout.inputs)
    taken = into * _share(unit.group_elements, layout.groups)
    return tuple(_part(work, layout, out, into, taken) for work in unit.works)


def _share(elements: int, workers: int) -> float:
    return ceil(elements / workers) / elements


def _part(work: LayerWork, layout: Layout, out: float, into: float, taken: float) -> LayerWork:
    """Cut a work. Shares: out of the outputs, into of the weights' inputs, taken of the layer's."""
    if not work.shapes:  # modules that work on the layer's parts
        return replace(
            work,
            moved_bytes=work.moved_bytes * out,
            output_bytes=work.output_bytes * out,
            kept_bytes=work.kept_bytes * out,
        )
    inputs_bytes = work.moved_bytes - work.output_bytes
    return replace(
        work,
        flops=work.flops * out * into,
        moved_bytes=inputs_bytes * taken + work.output_bytes * out,
        weight_bytes=work.weight_bytes * out * into,
        shapes=tuple(_cut(shape, out, into) for shape in work.shapes),
        output_bytes=work.output_bytes * out,
        kept_bytes=work.kept_bytes * taken,  # its inputs
    )


def _cut(shape: tuple[int, ...], out: float, into: float) -> tuple[int, ...]:
    first = round(shape[0] * out)
    return (first,) if len(shape) == 1 else (first, round(shape[1] * into), *shape[2:])


def rank_work(work: Workload, chain: Sequence[Unit], layouts: Layouts) -> Workload:
    """The workload of one worker: its parts of the layers.

    Activations are those of a round: one micro-batch of the units that most workers share by batch,
    and as many of the others as there are then. Inputs gathered for backward, by shared outputs,
    rows or paths, count as activations.
    """
    most = max(layout.batch for layout in layouts)
    layers: list[LayerWork] = []
    for unit, layout in zip(chain, layouts, strict=True):
        part, times = part_of(unit, layout), most / layout.batch
        kept = _kept(unit, part, layout)
        layers += [replace(work, kept_bytes=k * times) for work, k in zip(part, kept, strict=True)]
    kept_bytes = sum(layer.kept_bytes for layer in layers)
    return replace(work, layers=tuple(layers), activation_bytes=kept_bytes)


def _kept(unit: Unit, part: Sequence[LayerWork], layout: Layout) -> list[float]:
    """Bytes that backward needs of each layer of a part; gathered inputs are memory of its own."""
    kept = [work.kept_bytes for work in part]
    if layout.in_parts.rows > 1:
        return kept_by_rows(unit, part, layout)
    if layout.paths > 1:
        kept[0] += BYTES_PER_ELEMENT * unit.inputs
    elif layout.outputs > 1:
        layer = next(at for at, work in enumerate(part) if work.shapes)
        kept[layer] = part[layer].moved_bytes - part[layer].output_bytes
    return kept


def updated_bytes(work: Workload, chain: Sequence[Unit], layouts: Layouts) -> float:
    """The most weight bytes that a worker updates: its apart parts, and shards of the rest."""
    most = max(layout.batch for layout in layouts)
    parts = [part_of(*pair) for pair in zip(chain, layouts, strict=True)]
    apart, shared = list[LayerWork](), list[LayerWork]()
    for layout, part in zip(layouts, parts, strict=True):
        (apart if is_apart(layout, most) else shared).extend(part)
    is_cut = any(layout.parts * layout.rows * layout.paths > 1 for layout in layouts)
    # Parts need not be rows, so each part has one owner.
    whole = work.has_whole_shards or is_cut
    rest = replace(work, layers=tuple(shared), has_whole_shards=whole)
    apart_bytes = sum((sum(layer.parameters_bytes) for layer in apart), 0.0)
    return apart_bytes + float(update_of(work, most).updated_bytes(rest, most))


def memory_of(
    work: Workload, chain: Sequence[Unit], layouts: Layouts, in_memory: int = 1
) -> dict[str, float]:
    """Bytes of one worker by purpose. in_memory: as in `memory_bytes`, if shared by batch."""
    local_work = rank_work(work, chain, layouts)
    is_whole = not any(layout.parts * layout.rows > 1 or layout.computed for layout in layouts)
    parts = memory_bytes(local_work, 1)
    most = max(layout.batch for layout in layouts)
    sums = running = shared = 0.0
    for unit, layout in zip(chain, layouts, strict=True):
        share = micro_batches_of(work, layout)
        weights = sum(sum(layer.parameters_bytes) for layer in part_of(unit, layout))
        if is_apart(layout, most):
            # One tree for each worker whose micro-batches it gets (`updates.part_sums`), with the
            # gradients of the running micro-batches.
            leaves = ceil(work.num_micro_batches / most)
            sums += weights * most / layout.batch * leaves.bit_length()
            continue
        sums += weights * max(0, share.bit_length() - 1)
        running += weights
        if in_memory > 1 and layout.model == 1:
            shared += weights
    largest = max(work.bucket_bytes, max(local_work.tensors_bytes, default=0))
    arrives = shared * (in_memory - 1) / in_memory + 2.0 * min(largest, running - shared)
    updated = updated_bytes(work, chain, layouts)
    optimizer = updated * work.optimizer_vectors
    by_purpose = parts | {
        "sums": sums,
        "running": running,
        "buckets": arrives,
        "optimizer": optimizer,
    }
    copied = by_purpose["parameters"] + by_purpose["optimizer"]
    made = updated * work.update_vectors
    return beside_micro_batch(
        by_purpose
        | {
            "saving": copied if is_whole else 0.0,
            "updating": made,
            "evaluating": evaluating_bytes(local_work),
        }
    )


def is_apart(layout: Layout, most: int) -> bool:
    """Whether a worker's part of a layer gets the micro-batches of several workers.

    Its gradients are then summed after backward. most: the largest `batch` of all layouts.
    """
    return layout.parts > 1 and layout.batch < most


def nodes_of(layout: Layout, most: int) -> int:
    """The worker's nodes of a gradient tree: one for each worker whose micro-batches it gets."""
    return most // layout.batch if is_apart(layout, most) else 1


def widest(memory: dict[str, float], device_bytes: float) -> float:
    """The factor by which all layers may be widened until memory is full; 0 if nothing fits.

    Layers that are w times as wide have w² times the weights and w times the activations, apart
    from the first one's inputs and the last one's outputs.
    """
    of_weights = sum(memory[word] for word in WEIGHTS)
    room = device_bytes - memory["library"]
    half = sum(memory[word] for word in OF_MICRO_BATCH) / 2
    if room <= 0:
        return 0.0
    return float((half**2 + of_weights * room) ** 0.5 - half) / of_weights if of_weights else 0.0


OF_MICRO_BATCH = ("activations", "backward", "allocator")
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
