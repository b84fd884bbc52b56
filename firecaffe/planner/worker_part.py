"""A worker's part of a network whose units have layouts: its work, its memory, its exchanges."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil

import numpy as np

from firecaffe.exchange.schedule import BYTES_PER_ELEMENT
from firecaffe.parallel.cut import ROWS, balanced
from firecaffe.planner.boundary_cost import Communication, Exchanges, MessageTraffic
from firecaffe.planner.chain import ImageRows, PathWork, Unit
from firecaffe.planner.layouts import Form, LayerLayout
from firecaffe.planner.memory import beyond_free_memory, evaluating_bytes, memory_bytes
from firecaffe.planner.update_price import update_of
from firecaffe.planner.workload import LayerWork, Workload


def cut_where_gathered(
    chain: Sequence[Unit], chosen: Mapping[str, str], parts: int
) -> tuple[Unit, ...]:
    """Cut units of layers split by rows, before the first module that needs whole images again.

    chosen: the split layers and their words. Raises: RecipeError if a layer has fewer rows than
    parts.
    """
    units: list[Unit] = []
    in_rows = False
    for unit in chain:
        in_rows = chosen.get(unit.name) == ROWS or (unit.halo > 0 and in_rows)
        if not in_rows:
            units.append(unit)
            continue
        layer = next(at for at, work in enumerate(unit.works) if work.name == unit.name)
        if (images := unit.images[layer]) is not None:
            images.check(unit.name, parts)
        stays = layer + 1
        for images in unit.images[stays:]:
            if images is None or not images.can_be_cut(parts):
                break
            stays += 1
        tail = unit.works[stays:]
        units.append(replace(unit, works=unit.works[:stays], images=unit.images[:stays]))
        if tail:
            first = tail[0]
            given = (first.moved_bytes - first.output_bytes) / BYTES_PER_ELEMENT
            units.append(Unit(first.name, tail, given, first.output_bytes / BYTES_PER_ELEMENT))
        in_rows = not tail
    return tuple(units)


def by_rows(unit: Unit, layout: LayerLayout) -> tuple[LayerWork, ...]:
    """The works of the worker that has most rows; each worker has the whole weights."""
    parts, workers = layout.in_parts.rows, layout.rows
    works = []
    for work, images in zip(unit.works, unit.images, strict=True):
        if images is None:  # modules before the layer work on whole images
            works.append(work)
            continue
        made, inputs_bytes = images.made(parts, workers), work.moved_bytes - work.output_bytes
        seen = images.seen(parts, workers) or made
        works.append(
            replace(
                work,
                flops=work.flops * made,
                moved_bytes=inputs_bytes * seen + work.output_bytes * made,
                output_bytes=work.output_bytes * made,
                kept_bytes=work.kept_bytes * made,
            )
        )
    return tuple(works)


def kept_by_rows(unit: Unit, part: Sequence[LayerWork], layout: LayerLayout) -> list[float]:
    """Bytes that backward needs of each layer of a worker's parts, for one image.

    Parts copy the rows that they read. A layer with weights keeps only this copy.
    """
    kept = []
    for whole, work, images in zip(unit.works, part, unit.images, strict=True):
        copied = 0.0
        if images is not None and work.backward_share > 0:
            seen = images.seen(layout.in_parts.rows, layout.rows)
            copied = (whole.moved_bytes - whole.output_bytes) * seen
        kept.append(copied + work.kept_bytes * (not (copied and work.shapes)))
    return kept


def by_paths(unit: Unit, layout: LayerLayout) -> tuple[LayerWork, ...]:
    """The works of the busiest worker: its paths, common layers, and modules after them."""
    paths = unit.paths
    assert paths is not None
    tail = unit.works[len(paths.common) + sum(map(len, paths.works)) :]
    runs = []
    for start, stop in runs_of(paths, layout):
        share = sum(paths.outputs[start:stop]) / sum(paths.outputs)
        run_works = tuple(work for path in paths.works[start:stop] for work in path)
        goes_on = (_on_share(work, share) for work in tail)
        runs.append((*paths.common, *run_works, *goes_on))
    return max(runs, key=lambda works: sum(work.flops for work in works))


def runs_of(paths: PathWork, layout: LayerLayout) -> list[tuple[int, int]]:
    """The range of paths of each worker, as (start, stop)."""
    parts, workers = layout.in_parts.paths, layout.paths
    ends = balanced(paths.sizes, parts)
    return [*pairwise(ends[:: parts // workers])]


def unevenness(unit: Unit, layout: LayerLayout) -> float:
    """The largest part of the output over an equal part, by rows or paths; 1 for other layers."""
    if layout.rows > 1:
        last = unit.images[-1]
        return layout.rows * last.made(layout.in_parts.rows, layout.rows) if last else 1.0
    if unit.paths is None or layout.paths == 1:
        return 1.0
    outputs = unit.paths.outputs
    largest = max(sum(outputs[start:stop]) for start, stop in runs_of(unit.paths, layout))
    return layout.paths * largest / sum(outputs)


def unevenness_of_input(unit: Unit, layout: LayerLayout) -> float:
    """The largest worker's rows of the input over an equal part; 1 if not by rows."""
    first = next((image for image in unit.images if image is not None), None)
    if layout.rows == 1 or first is None:
        return 1.0
    return layout.rows * first.given(layout.in_parts.rows, layout.rows)


@dataclass(frozen=True)
class PartExchanges:
    """Prices the exchanges between a layer's parts; bytes are the mean of the workers."""

    exchanges: Exchanges
    rounds: int
    samples: float
    """Samples of a step that a worker takes part in."""
    itemsize: int

    def paths(self, unit: Unit, layout: LayerLayout) -> Communication:
        """Price the sum of the gradients of the paths' inputs."""
        if unit.paths is None or layout.paths == 1 or not unit.has_input_gradient:
            return Communication()
        return self._sum(self.itemsize * self.samples * unit.paths.taken, layout.paths)

    def rows(self, unit: Unit, layout: LayerLayout) -> Communication:
        """Price halos, and sums over all rows."""
        if layout.rows == 1:
            return Communication()
        return Communication.in_sequence([*self._halos(unit, layout), *self._sums(unit, layout)])

    def _halos(self, unit: Unit, layout: LayerLayout) -> list[Communication]:
        halos = []
        for work, images in zip(unit.works, unit.images, strict=True):
            if images is None:
                continue
            crossing = images.crossing(layout.in_parts.rows, layout.rows)
            halos.append(self._halo(images, crossing))
            wanted = unit.has_input_gradient if work.name == unit.name else work.backward_share > 0
            if wanted:
                halos.append(self._halo(images, [*map(list, zip(*crossing, strict=True))]))
        return halos

    def _halo(self, images: ImageRows, crossing: Sequence[Sequence[int]]) -> Communication:
        network = self.exchanges.network
        row_bytes = self.itemsize * images.row * self.samples
        messages = np.zeros(len(network.links))
        most = np.zeros(len(network.links))
        for source, sent in enumerate(crossing):
            outgoing = np.zeros((2, len(network.links)))
            for destination, rows in enumerate(sent):
                if rows:
                    outgoing[:, network.level(source, destination)] += 1, rows
            messages, most = np.maximum(messages, outgoing[0]), np.maximum(most, outgoing[1])
        most_sent = self.exchanges.price([MessageTraffic(messages, most)], row_bytes, self.rounds)
        return most_sent._replace(sent_bytes=row_bytes * sum(map(sum, crossing)) / len(crossing))

    def _sums(self, unit: Unit, layout: LayerLayout) -> list[Communication]:
        sizes = [size for work in unit.works for size in work.parameters_bytes]
        layer = next((image for image in unit.images if image is not None and image.is_layer), None)
        if layer is not None and layer.summed:
            times = 4 if unit.has_input_gradient else 2
            sizes += [BYTES_PER_ELEMENT * layer.summed] * times
        return [self._sum(self.rounds * size, layout.rows) for size in sizes]

    def _sum(self, num_bytes: float, workers: int) -> Communication:
        """Price an all-reduce: reduce-scatter, then all-gather. num_bytes: those of a step."""
        digit = 1, workers
        shares = Form(channels=(digit,))
        traffics = [self.exchanges.sums(digit, Form()), self.exchanges.fetch(shares, Form())]
        return self.exchanges.price(traffics, num_bytes, self.rounds)


Layouts = Sequence[LayerLayout]
"""One layout for each unit of a chain."""


def micro_batches_of(work: Workload, layout: LayerLayout) -> int:
    """The number of micro-batches of a step that a worker takes part in."""
    return ceil(work.num_micro_batches / layout.batch)


def part_of(unit: Unit, layout: LayerLayout) -> tuple[LayerWork, ...]:
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


def _on_share(work: LayerWork, share: float) -> LayerWork:
    """The work of a module without weights on a share of what it is given."""
    return replace(
        work,
        moved_bytes=work.moved_bytes * share,
        output_bytes=work.output_bytes * share,
        kept_bytes=work.kept_bytes * share,
    )


def _part(work: LayerWork, layout: LayerLayout, out: float, into: float, taken: float) -> LayerWork:
    """Cut a work by shares: `out` of outputs, `into` of weights' inputs, `taken` of the layer's."""
    if not work.shapes:  # modules that work on the layer's parts
        return _on_share(work, out)
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

    Activations are those of a round: one micro-batch in units whose batch most workers share, and
    several in units whose batch fewer workers share. Inputs that splits by outputs, rows or paths
    gather for backward count as activations.
    """
    most = max(layout.batch for layout in layouts)
    layers: list[LayerWork] = []
    for unit, layout in zip(chain, layouts, strict=True):
        part, times = part_of(unit, layout), most / layout.batch
        kept = _kept(unit, part, layout)
        layers += [replace(work, kept_bytes=k * times) for work, k in zip(part, kept, strict=True)]
    kept_bytes = sum(layer.kept_bytes for layer in layers)
    return replace(work, layers=tuple(layers), activation_bytes=kept_bytes)


def _kept(unit: Unit, part: Sequence[LayerWork], layout: LayerLayout) -> list[float]:
    """Bytes that backward needs of each layer of a part; gathered inputs are additional memory."""
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
    """The most weight bytes that a worker updates: its apart parts, and its shards of the rest."""
    most = max(layout.batch for layout in layouts)
    parts = [part_of(*pair) for pair in zip(chain, layouts, strict=True)]
    apart, shared = list[LayerWork](), list[LayerWork]()
    for layout, part in zip(layouts, parts, strict=True):
        (apart if is_apart(layout, most) else shared).extend(part)
    is_cut = any(layout.parts * layout.rows * layout.paths > 1 for layout in layouts)
    # Parts of weights need not be whole rows, so each part has one owner.
    whole = work.has_whole_shards or is_cut
    rest = replace(work, layers=tuple(shared), has_whole_shards=whole)
    apart_bytes = sum((sum(layer.parameters_bytes) for layer in apart), 0.0)
    return apart_bytes + float(update_of(work, most).updated_bytes(rest, most))


def memory_of(
    work: Workload, chain: Sequence[Unit], layouts: Layouts, in_memory: int = 1
) -> dict[str, float]:
    """Bytes of one worker by purpose. in_memory: as in `memory_bytes`, for `model` of 1."""
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
    return beyond_free_memory(
        by_purpose
        | {
            "saving": copied if is_whole else 0.0,
            "updating": made,
            "evaluating": evaluating_bytes(local_work),
        }
    )


def is_apart(layout: LayerLayout, most: int) -> bool:
    """Whether a worker's part of a layer gets the micro-batches of several workers.

    Its gradients are then summed after backward. most: the largest `batch` of all layouts.
    """
    return layout.parts > 1 and layout.batch < most


def nodes_of(layout: LayerLayout, most: int) -> int:
    """A worker's nodes of a gradient tree: one for each worker whose micro-batches it gets."""
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
