"""What a kernel that goes over the rows of images sees of them, and what crosses borders for it."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from torch import nn

from firecaffe.errors import RecipeError
from firecaffe.parallel.cut import cut

ROWS = "rows"
"""The word for layers of images, which are cut: how many rows there are is known when they come."""


class Slide(NamedTuple):
    """How a kernel goes over rows."""

    kernel: int
    stride: int
    before: int
    """Rows of padding before the first one."""
    after: int
    dilation: int = 1
    is_ceil: bool = False
    """Whether the last window may reach beyond the padding."""

    @property
    def reach(self) -> int:
        """Rows from the first to the last that the kernel sees, with those it leaves out."""
        return (self.kernel - 1) * self.dilation + 1

    def outputs(self, rows: int) -> int:
        """The rows that it makes of so many; less than one if there are too few."""
        left = rows + self.before + self.after - self.reach
        count = (-(-left // self.stride) if self.is_ceil else left // self.stride) + 1
        begins_behind = (count - 1) * self.stride >= rows + self.before
        return count - 1 if self.is_ceil and begins_behind else count

    def seen(self, outputs: range) -> range:
        """The rows that these are made of; some are beyond the edges."""
        first, last = outputs[0] * self.stride, outputs[-1] * self.stride
        return range(first - self.before, last - self.before + self.reach)


def padding_of(layer: nn.Conv2d) -> list[tuple[int, int]]:
    """Before and after the rows, and the columns."""
    if isinstance(layer.padding, str):
        if layer.padding == "valid":
            return [(0, 0), (0, 0)]
        totals = [a * (k - 1) for a, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    return [(each, each) for each in layer.padding]


def slide_of(layer: nn.Conv2d) -> Slide:
    """A convolution's, over rows."""
    return Slide(layer.kernel_size[0], layer.stride[0], *padding_of(layer)[0], layer.dilation[0])


def pool_slide(
    kernel_size: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool
) -> Slide:
    """A pool's, over rows, by its words."""
    kernel = pair(kernel_size)[0]
    step = kernel if stride is None or stride == [] else pair(stride)[0]
    before = pair(padding)[0]
    return Slide(kernel, step, before, before, pair(dilation)[0], ceil_mode)


def pair(value: Any) -> tuple[int, int]:
    """Of rows, and of columns."""
    if isinstance(value, Sequence):
        return value[0], value[-1]
    return value, value


def check_enough(name: str, rows: int, outputs: int, num_parts: int) -> None:
    """Raises: RecipeError if there are fewer rows than parts, of the input or of the output."""
    if min(rows, outputs) < num_parts:
        raise RecipeError(
            f"split: {name} makes {max(outputs, 0)} rows of {rows}, fewer than {num_parts} parts; "
            "leave it out of split, or take fewer parts"
        )


def windows_of(seen: Sequence[range], rows: int) -> tuple[range, ...]:
    """What parts see of so many rows. One at least: a part may see nothing but padding, and that
    row is then cropped.
    """
    return tuple(
        range(min(max(each.start, 0), rows - 1), max(min(each.stop, rows), 1)) for each in seen
    )


def part_windows(slide: Slide, rows: int, num_parts: int) -> tuple[range, ...]:
    """What each part sees of so many rows.

    Raises: ValueError if there are fewer rows than parts, of the output.
    """
    made = cut(slide.outputs(rows), num_parts)
    return windows_of([slide.seen(range(*ends)) for ends in pairwise(made)], rows)


def crossing_rows(slide: Slide, rows: int, num_parts: int) -> int:
    """The rows that parts see of others, all parts together.

    Raises: ValueError if there are fewer rows than parts, of the input or of the output.
    """
    return sum(map(sum, crossing_between(slide, rows, num_parts, num_parts)))


def crossing_between(slide: Slide, rows: int, num_parts: int, workers: int) -> list[list[int]]:
    """The rows of each worker that parts of each other one see, each as often as a part sees it.

    Raises: as `crossing_rows`.
    """
    own = [range(*ends) for ends in pairwise(cut(rows, num_parts))]
    found, each = [[0] * workers for _ in range(workers)], num_parts // workers
    for part, window in enumerate(part_windows(slide, rows, num_parts)):
        for source, has in enumerate(own):
            if source // each != part // each:
                seen = range(max(window.start, has.start), min(window.stop, has.stop))
                found[source // each][part // each] += len(seen)
    return found
