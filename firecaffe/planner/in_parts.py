"""Layers split by rows or paths: a worker's part, and the exchanges between parts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from firecaffe.exchange.choose import BYTES_PER_ELEMENT
from firecaffe.parallel.cut import balanced
from firecaffe.parallel.slide import ROWS
from firecaffe.planner.between import Exchanges, Traffic
from firecaffe.planner.chain import Images, Paths, Unit
from firecaffe.planner.layouts import Form, Layout
from firecaffe.planner.workload import LayerWork


def cut_where_gathered(
    chain: Sequence[Unit], chosen: Mapping[str, str], parts: int
) -> tuple[Unit, ...]:
    """Split units behind layers by rows, where modules need whole images again.

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
            if images is None or not images.can_go_on(parts):
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


def by_rows(unit: Unit, layout: Layout) -> tuple[LayerWork, ...]:
    """The works of the worker that has most rows; each worker has whole weights."""
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


def kept_by_rows(unit: Unit, part: Sequence[LayerWork], layout: Layout) -> list[float]:
    """Bytes that backward needs of each layer of a worker's parts, for one image.

    Parts copy the rows that they see. These are all that a layer with weights keeps.
    """
    kept = []
    for whole, work, images in zip(unit.works, part, unit.images, strict=True):
        copied = 0.0
        if images is not None and work.backward_share > 0:
            seen = images.seen(layout.in_parts.rows, layout.rows)
            copied = (whole.moved_bytes - whole.output_bytes) * seen
        kept.append(copied + work.kept_bytes * (not (copied and work.shapes)))
    return kept


def by_paths(unit: Unit, layout: Layout) -> tuple[LayerWork, ...]:
    """The works of the busiest worker: its paths, common layers, and what follows on its output."""
    paths = unit.paths
    assert paths is not None
    tail = unit.works[len(paths.common) + sum(map(len, paths.works)) :]
    runs = []
    for start, stop in runs_of(paths, layout):
        share = sum(paths.outputs[start:stop]) / sum(paths.outputs)
        run_works = tuple(work for path in paths.works[start:stop] for work in path)
        goes_on = (
            replace(
                work,
                moved_bytes=work.moved_bytes * share,
                output_bytes=work.output_bytes * share,
                kept_bytes=work.kept_bytes * share,
            )
            for work in tail
        )
        runs.append((*paths.common, *run_works, *goes_on))
    return max(runs, key=lambda works: sum(work.flops for work in works))


def runs_of(paths: Paths, layout: Layout) -> list[tuple[int, int]]:
    """The range of paths of each worker, as (start, stop)."""
    parts, workers = layout.in_parts.paths, layout.paths
    ends = balanced(paths.sizes, parts)
    return [*pairwise(ends[:: parts // workers])]


def unevenness(unit: Unit, layout: Layout) -> float:
    """The largest part of the output over an equal part, by rows or paths; 1 for other layers."""
    if layout.rows > 1:
        last = unit.images[-1]
        return layout.rows * last.made(layout.in_parts.rows, layout.rows) if last else 1.0
    if unit.paths is None or layout.paths == 1:
        return 1.0
    outputs = unit.paths.outputs
    largest = max(sum(outputs[start:stop]) for start, stop in runs_of(unit.paths, layout))
    return layout.paths * largest / sum(outputs)


def unevenness_of_input(unit: Unit, layout: Layout) -> float:
    """The largest worker's rows of the input over an equal part; 1 if not by rows."""
    first = next((image for image in unit.images if image is not None), None)
    if layout.rows == 1 or first is None:
        return 1.0
    return layout.rows * first.given(layout.in_parts.rows, layout.rows)


@dataclass(frozen=True)
class PartExchanges:
    """Exchanges between a layer's parts, as seconds of a step and mean bytes sent by a worker."""

    exchanges: Exchanges
    rounds: int
    samples: float
    """Samples of a step that a worker takes part in."""
    itemsize: int

    def paths(self, unit: Unit, layout: Layout) -> tuple[float, float]:
        """Price the sum of the gradients of the paths' inputs."""
        if unit.paths is None or layout.paths == 1 or not unit.has_input_gradient:
            return 0.0, 0.0
        return self._sum(self.itemsize * self.samples * unit.paths.taken, layout.paths)

    def rows(self, unit: Unit, layout: Layout) -> tuple[float, float]:
        """Price halos, and sums over all rows."""
        if layout.rows == 1:
            return 0.0, 0.0
        prices = [*self._halos(unit, layout), *self._sums(unit, layout)]
        return sum(seconds for seconds, _ in prices), sum(sent for _, sent in prices)

    def _halos(self, unit: Unit, layout: Layout) -> list[tuple[float, float]]:
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

    def _halo(self, images: Images, crossing: Sequence[Sequence[int]]) -> tuple[float, float]:
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
        seconds = self.exchanges.seconds([Traffic(messages, most)], row_bytes, self.rounds)
        return seconds, row_bytes * sum(map(sum, crossing)) / len(crossing)

    def _sums(self, unit: Unit, layout: Layout) -> list[tuple[float, float]]:
        sizes = [size for work in unit.works for size in work.parameters_bytes]
        layer = next((image for image in unit.images if image is not None and image.is_layer), None)
        if layer is not None and layer.summed:
            times = 4 if unit.has_input_gradient else 2
            sizes += [BYTES_PER_ELEMENT * layer.summed] * times
        return [self._sum(self.rounds * size, layout.rows) for size in sizes]

    def _sum(self, num_bytes: float, workers: int) -> tuple[float, float]:
        """Price a sum for all workers: reduce-scatter, then all-gather. num_bytes: of a step."""
        digit = 1, workers
        shares = Form(channels=(digit,))
        traffics = [self.exchanges.sums(digit, Form()), self.exchanges.fetch(shares, Form())]
        seconds = self.exchanges.seconds(traffics, num_bytes, self.rounds)
        return seconds, num_bytes * sum(float(traffic.share.sum()) for traffic in traffics)
