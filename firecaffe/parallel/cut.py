"""Cuts of a dimension into parts, and the rows of an image that a part's kernel sees.

A kernel also sees rows beyond the border of its part: those are what parts exchange.
"""

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

from torch import nn

from firecaffe.errors import RecipeError
from firecaffe.exchange.schedule import shards

Cut = tuple[int, ...]
"""The ends of the parts of a dimension: part p is the elements [cut[p], cut[p + 1])."""


def cut(size: int, num_parts: int, grain: int = 1) -> Cut:
    """Cut a dimension into parts equal to within a grain. Raises: ValueError if one is empty."""
    # A grain stays together, as the filters of one group.
    if num_parts > size // grain:
        raise ValueError(f"{size // grain} cannot be cut into {num_parts} parts")
    return (0, *(stop * grain for _, stop in shards(size // grain, num_parts)))


def balanced(costs: Sequence[int], num_parts: int) -> Cut:
    """Cut elements into consecutive parts, none empty, so that the costliest one is cheapest."""

    @cache
    def best(stop: int, parts: int) -> tuple[int, Cut]:
        # The cost, and the cut, of the elements before `stop` in so many parts.
        if parts == 1:
            return sum(costs[:stop]), (0, stop)
        candidates = []
        for last in range(parts - 1, stop):
            cost, ends = best(last, parts - 1)
            candidates.append((max(cost, sum(costs[last:stop])), (*ends, stop)))
        return min(candidates)

    return best(len(costs), num_parts)[1]


def scaled(cut: Cut, by: int) -> Cut:
    return tuple(end * by for end in cut)


ROWS = "rows"
"""The split of layers by rows of images. The number of rows is known when images arrive."""


class Slide(NamedTuple):
    kernel: int
    stride: int
    before: int
    after: int
    dilation: int = 1
    is_ceil: bool = False
    """Whether the last window may reach beyond the padding."""

    @property
    def reach(self) -> int:
        """Rows from the first to the last that the kernel sees, with those that dilation skips."""
        return (self.kernel - 1) * self.dilation + 1

    def outputs(self, rows: int) -> int:
        """Return the number of output rows; less than one if there are too few rows."""
        left = rows + self.before + self.after - self.reach
        count = (-(-left // self.stride) if self.is_ceil else left // self.stride) + 1
        begins_behind = (count - 1) * self.stride >= rows + self.before
        return count - 1 if self.is_ceil and begins_behind else count

    def seen(self, outputs: range) -> range:
        """Return the rows that these outputs are made from; some are beyond the edges."""
        first, last = outputs[0] * self.stride, outputs[-1] * self.stride
        return range(first - self.before, last - self.before + self.reach)


def padding_of(layer: nn.Conv2d) -> list[tuple[int, int]]:
    """Return the padding before and after: of the rows, and of the columns."""
    if isinstance(layer.padding, str):
        if layer.padding == "valid":
            return [(0, 0), (0, 0)]
        totals = [a * (k - 1) for a, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    return [(amount, amount) for amount in layer.padding]


def slide_of(layer: nn.Conv2d) -> Slide:
    return Slide(layer.kernel_size[0], layer.stride[0], *padding_of(layer)[0], layer.dilation[0])


def pool_slide(
    kernel_size: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool
) -> Slide:
    kernel = pair(kernel_size)[0]
    step = kernel if stride is None or stride == [] else pair(stride)[0]
    before = pair(padding)[0]
    return Slide(kernel, step, before, before, pair(dilation)[0], ceil_mode)


def pair(value: Any) -> tuple[int, int]:
    if isinstance(value, Sequence):
        return value[0], value[-1]
    return value, value


def check_num_rows(name: str, rows: int, outputs: int, num_parts: int) -> None:
    """Check rows. Raises: RecipeError if there are fewer input or output rows than parts."""
    if min(rows, outputs) < num_parts:
        raise RecipeError(
            f"split: {name} makes {max(outputs, 0)} rows of {rows}, fewer than {num_parts} parts; "
            "leave it out of split, or take fewer parts"
        )


def windows_of(seen: Sequence[range], rows: int) -> tuple[range, ...]:
    """Return the existing rows that each part sees; one, cropped later, if it sees only padding."""
    return tuple(
        range(min(max(window.start, 0), rows - 1), max(min(window.stop, rows), 1))
        for window in seen
    )


def part_windows(slide: Slide, rows: int, num_parts: int) -> tuple[range, ...]:
    """Return the rows that each part sees. Raises: ValueError for fewer output rows than parts."""
    made = cut(slide.outputs(rows), num_parts)
    return windows_of([slide.seen(range(*ends)) for ends in pairwise(made)], rows)


def crossing_rows(slide: Slide, rows: int, num_parts: int) -> int:
    """Count the rows that parts see of others. Raises: ValueError for fewer rows than parts."""
    return sum(map(sum, crossing_between(slide, rows, num_parts, num_parts)))


def crossing_between(slide: Slide, rows: int, num_parts: int, workers: int) -> list[list[int]]:
    """Count the rows of each worker that each other's parts see. Raises: as `crossing_rows`."""
    part_rows = [range(*ends) for ends in pairwise(cut(rows, num_parts))]
    crossing, per_worker = [[0] * workers for _ in range(workers)], num_parts // workers
    for part, window in enumerate(part_windows(slide, rows, num_parts)):
        for source, has in enumerate(part_rows):
            if source // per_worker != part // per_worker:
                seen = range(max(window.start, has.start), min(window.stop, has.stop))
                crossing[source // per_worker][part // per_worker] += len(seen)
    return crossing
