"""PriorBox: the boxes of fixed sizes and shapes around each place of a plane.

Source: SSD (arXiv 1512.02325, section 2.2); the order of the boxes as in its fork
(github.com/weiliu89/caffe): for each min_size, its square; the square of sqrt(min · max); then the
aspect ratios in the file's order, each followed by its inverse if `flip`.
"""

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from firecaffe.caffe.layers.axis import check_bottoms
from firecaffe.caffe.layers.checks import want_axes
from firecaffe.caffe.layers.spec import Kind, Spec

EQUAL = 1e-6
"""Aspect ratios that differ by less are the same."""


class PriorBox(nn.Module):
    """forward(planes, images): (1, 2, H · W · boxes · 4), the corners x1, y1, x2, y2 as shares of
    the image's size, and the variance of each.
    """

    def __init__(
        self,
        sizes: Sequence[tuple[float, float]],
        variances: Sequence[float],
        image: tuple[float, float],
        step: tuple[float, float],
        offset: float,
        clip: bool,
    ) -> None:
        """sizes: width and height of each box, in pixels. variances: four.
        image, step: height and width, in pixels; 0 takes those of the images, and theirs over the
        planes'.
        """
        super().__init__()
        self.sizes, self.variances = list(sizes), list(variances)
        self.image, self.step, self.offset, self.clip = image, step, offset, clip

    def forward(self, planes: Tensor, images: Tensor) -> Tensor:
        rows, columns = planes.shape[2:]
        height, width = (
            given or float(size) for given, size in zip(self.image, images.shape[2:], strict=True)
        )
        y_step, x_step = self.step[0] or height / rows, self.step[1] or width / columns
        tensor = partial(torch.tensor, dtype=torch.float32, device=planes.device)
        place = partial(torch.arange, dtype=torch.float32, device=planes.device)
        sizes = tensor(self.sizes)
        half = torch.cat([-sizes, sizes], 1) / 2
        y = (place(rows) + self.offset) * y_step
        x = (place(columns) + self.offset) * x_step
        center = torch.stack([x.expand(rows, -1), y.unsqueeze(1).expand(-1, columns)], -1)
        scale = tensor([width, height, width, height])
        corners = (center.repeat(1, 1, 2).unsqueeze(2) + half) / scale
        if self.clip:
            corners = corners.clamp(0, 1)
        variances = tensor(self.variances).expand_as(corners)
        return torch.stack([corners.flatten(), variances.flatten()]).unsqueeze(0)


def prior_box(spec: Spec) -> PriorBox:
    check_bottoms(spec, 2)
    want_axes(spec, 4)
    want_axes(spec, 4, bottom=1)
    param = spec.param
    variances = param.numbers("variance") or [0.1]
    if len(variances) not in (1, 4) or min(variances) <= 0:
        raise param.error(
            f"variance is {', '.join(map(str, variances))}; expected 1 or 4 numbers above 0",
            param.line_of("variance"),
        )
    return PriorBox(
        box_sizes(spec),
        variances * (4 // len(variances)),
        pair(spec, "img_size", "img_h", "img_w"),
        pair(spec, "step", "step_h", "step_w"),
        param.number("offset", 0.5),
        param.flag("clip"),
    )


def box_sizes(spec: Spec) -> list[tuple[float, float]]:
    """Width and height of each box of a place."""
    param = spec.param
    smallest, largest = param.numbers("min_size"), param.numbers("max_size")
    if not smallest or min(smallest) <= 0:
        raise param.error(
            f"PriorBox {spec.name!r} needs min_size, above 0", param.line_of("min_size")
        )
    if largest and len(largest) != len(smallest):
        raise param.error(
            f"{len(largest)} max_size for {len(smallest)} min_size; expected as many, or none",
            param.line_of("max_size"),
        )
    ratios = aspect_ratios(spec)
    sizes = []
    for place, low in enumerate(smallest):
        sizes.append((low, low))
        if largest:
            if largest[place] <= low:
                raise param.error(
                    f"max_size is {largest[place]:g}; expected more than the min_size {low:g}",
                    param.line_of("max_size"),
                )
            middle = math.sqrt(low * largest[place])
            sizes.append((middle, middle))
        sizes += [(low * math.sqrt(ratio), low / math.sqrt(ratio)) for ratio in ratios]
    return sizes


def aspect_ratios(spec: Spec) -> list[float]:
    """Those beside 1, which min_size has."""
    found = [1.0]
    flip = spec.param.flag("flip", True)
    for ratio in spec.param.numbers("aspect_ratio"):
        if ratio <= 0:
            raise spec.param.error(
                f"aspect_ratio is {ratio:g}; expected more than 0",
                spec.param.line_of("aspect_ratio"),
            )
        if all(abs(ratio - other) >= EQUAL for other in found):
            found += [ratio, 1 / ratio] if flip else [ratio]
    return found[1:]


def pair(spec: Spec, both: str, high: str, wide: str) -> tuple[float, float]:
    """Height and width, given as one number or as two; (0, 0) if not given."""
    param = spec.param
    if not any(map(param.has, (both, high, wide))):
        return 0.0, 0.0
    values = (param.number(high), param.number(wide))
    if param.has(both):
        if any(values):
            raise param.error(
                f"{both} is given beside {high} or {wide}; expected one way",
                param.line_of(both),
            )
        values = (param.number(both), param.number(both))
    if min(values) <= 0:
        raise param.error(f"{both}, or {high} and {wide}, of {spec.name!r} must be above 0")
    return values


LAYERS = {"PriorBox": Kind(prior_box, "prior_box_param", ())}
