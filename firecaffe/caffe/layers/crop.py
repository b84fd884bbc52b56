"""Crop: the first bottom, cut to the size of the second.

Source: Caffe's tutorial on layers (caffe.berkeleyvision.org/tutorial/layers/crop.html): the axes
from `axis` on are cut; `offset` is none, one for all of them, or one for each.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from firecaffe.caffe.layers.axis import axis_of, check_bottoms
from firecaffe.caffe.layers.spec import Kind, Spec


class Crop(nn.Module):
    """forward((…), (…)): the first, with the second's sizes from `axis` on."""

    def __init__(self, axis: int, offsets: Sequence[int]) -> None:
        """offsets: one for each axis from `axis` on."""
        super().__init__()
        self.axis, self.offsets = axis, tuple(offsets)

    def forward(self, whole: Tensor, like: Tensor) -> Tensor:
        for axis, offset in enumerate(self.offsets, self.axis):
            whole = whole.narrow(axis, offset, like.shape[axis])
        return whole


def crop(spec: Spec) -> Crop:
    check_bottoms(spec, 2)
    whole, like = spec.bottoms
    axis, offsets = axis_of(spec, "axis", 2, whole), spec.param.integers("offset")
    line = spec.param.line_of("offset") or spec.layer.line
    count = len(whole) - axis
    if len(offsets) <= 1:
        offsets = (offsets or [0]) * count
    if len(offsets) != count:
        raise spec.param.error(
            f"{len(offsets)} offsets; expected 1, or {count} for the axes {axis} to "
            f"{len(whole) - 1}",
            line,
        )
    if len(like) != len(whole):
        raise spec.layer.error(
            f"Crop {spec.name!r} cuts {tuple(whole)} to the size of {tuple(like)}; expected "
            "as many axes"
        )
    for place, offset in enumerate(offsets, axis):
        if offset < 0 or offset + like[place] > whole[place]:
            raise spec.param.error(
                f"axis {place} of {spec.name!r} is cut to {like[place]} from {offset} on; the "
                f"bottom has {whole[place]}",
                line,
            )
    return Crop(axis, offsets)


LAYERS = {"Crop": Kind(crop, "crop_param", ())}
