"""The images that a network's modules go over, as far as rows of them can be cut."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from firecaffe.caffe.local_response_norm import LocalResponseNorm
from firecaffe.parallel.cut import cut
from firecaffe.parallel.slide import (
    Slide,
    check_enough,
    crossing_between,
    part_windows,
    pool_slide,
)
from firecaffe.plan.rows_and_paths import rows_of

BY_ELEMENT = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus),
    *(nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Sigmoid, nn.Tanh, nn.Identity, nn.Dropout),
)
"""Modules that work on each element by itself, as of `parallel.rules`."""

NORMS = (nn.LocalResponseNorm, LocalResponseNorm)
"""Modules that see their neighbours' channels too."""


@dataclass(frozen=True)
class Images:
    """What one module is given."""

    slide: Slide | None
    """How a convolution or a pool goes over rows; None if it works on each row by itself."""
    rows: int
    row: int
    """Numbers of a row, of one sample."""
    summed: int = 0
    """Channels whose statistics are summed over all rows, of a batch normalization."""
    is_layer: bool = False
    """Whether it is a layer that `rows` is a word for."""

    @property
    def outputs(self) -> int:
        """The rows that it makes."""
        return self.rows if self.slide is None else self.slide.outputs(self.rows)

    def can_go_on(self, parts: int) -> bool:
        """Whether a module behind a layer by rows makes enough of them."""
        return self.outputs >= parts

    def check(self, name: str, parts: int) -> None:
        """Raises: RecipeError if there are fewer rows than parts."""
        check_enough(name, self.rows, self.outputs, parts)

    def given(self, parts: int, workers: int) -> float:
        """The share of the rows of the input that the worker with most has."""
        return _largest(self.rows, parts, workers)

    def made(self, parts: int, workers: int) -> float:
        """The same of the output."""
        return _largest(self.outputs, parts, workers)

    def seen(self, parts: int, workers: int) -> float:
        """The rows that a worker's parts see, each as often as a part does, over all of the input:
        of the worker that has most. 0 of what is given its rows as they are.
        """
        if self.slide is None:
            return 0.0
        windows, each = part_windows(self.slide, self.rows, parts), parts // workers
        of_workers = (windows[start : start + each] for start in range(0, parts, each))
        return max(sum(map(len, own)) for own in of_workers) / self.rows

    def crossing(self, parts: int, workers: int) -> list[list[int]]:
        """As of `parallel.slide.crossing_between`."""
        if self.slide is None:
            return [[0] * workers for _ in range(workers)]
        return crossing_between(self.slide, self.rows, parts, workers)


def _largest(rows: int, parts: int, workers: int) -> float:
    ends = cut(rows, parts)[:: parts // workers]
    return max(stop - start for start, stop in pairwise(ends)) / rows


def _slide_of_pool(part: Any) -> Slide | None:
    """None if it is none that goes on over rows."""
    if type(part) is nn.MaxPool2d and not part.return_indices:
        words = part.kernel_size, part.stride, part.padding, part.dilation, part.ceil_mode
        return pool_slide(*words)
    if type(part) is nn.AvgPool2d:
        return pool_slide(part.kernel_size, part.stride, part.padding, 1, part.ceil_mode)
    return None


def images_in(network: nn.Module, run: Callable[[], object]) -> Mapping[str, Images]:
    """What modules are given in a run of the network, by their names; without those that need
    whole images.
    """
    found: dict[str, Images] = {}

    def note(name: str, part: nn.Module, taken: tuple[Any, ...]) -> None:
        if not taken or not isinstance(taken[0], Tensor) or taken[0].ndim != 4:
            return
        shape = tuple(taken[0].shape)
        rows, row = shape[2], shape[1] * shape[3]
        if (layer := rows_of(part, shape)) is not None:
            summed = shape[1] if layer.slide is None else 0
            found[name] = Images(layer.slide, rows, row, summed, is_layer=True)
        elif (slide := _slide_of_pool(part)) is not None or type(part) in (*BY_ELEMENT, *NORMS):
            found[name] = Images(slide, rows, row)

    handles = [
        part.register_forward_pre_hook(partial(note, name))
        for name, part in network.named_modules()
    ]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return found
