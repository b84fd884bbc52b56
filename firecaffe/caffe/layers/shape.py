"""Flatten, Reshape and Silence."""

import math

from torch import Tensor, nn

from firecaffe.caffe.layers.axis import axis_of, check_bottoms, shown
from firecaffe.caffe.layers.spec import Kind, Spec


def flatten(spec: Spec) -> nn.Module:
    check_bottoms(spec, 1)
    bottom = spec.bottoms[0]
    return nn.Flatten(axis_of(spec, "axis", 1, bottom), axis_of(spec, "end_axis", -1, bottom))


class Reshape(nn.Module):
    """Other sizes for the axes from `start` to `stop`: 0 keeps the bottom's, one -1 is what is
    left.
    """

    def __init__(self, sizes: list[int], start: int, stop: int) -> None:
        super().__init__()
        self.sizes, self.start, self.stop = sizes, start, stop

    def forward(self, x: Tensor) -> Tensor:
        sizes = [
            x.shape[self.start + place] if size == 0 else size
            for place, size in enumerate(self.sizes)
        ]
        return x.reshape(*x.shape[: self.start], *sizes, *x.shape[self.stop :])

    def extra_repr(self) -> str:
        return f"{self.sizes}, start={self.start}, stop={self.stop}"


def reshape(spec: Spec) -> nn.Module:
    check_bottoms(spec, 1)
    param, bottom = spec.param, spec.bottoms[0]
    start = axis_of(spec, "axis", 0, bottom, end=1)
    count = param.integer("num_axes", -1)
    stop = len(bottom) if count == -1 else start + count
    sizes = param.message("shape").integers("dim")
    behind = bottom[start:]
    given = [behind[n] if size == 0 and n < len(behind) else size for n, size in enumerate(sizes)]
    whole, known = math.prod(bottom[start:stop]), math.prod(size for size in given if size != -1)
    fits = known > 0 and (whole % known == 0 if -1 in sizes else whole == known)
    if stop > len(bottom) or sizes.count(-1) > 1 or any(s < -1 for s in sizes) or not fits:
        raise spec.layer.error(
            f"Reshape {spec.name!r} makes {shown(sizes)} of axes {start} to {stop} of "
            f"{shown(bottom)}; expected as many elements, and at most one -1"
        )
    # The batch that the file has in mind is not the one that comes: of several workers, each has
    # its part.
    if start == 0 and -1 not in sizes[:1] and sizes and sizes[0] == bottom[0]:
        sizes = [0, *sizes[1:]]
    return Reshape(sizes, start, stop)


class Silence(nn.Module):
    """Takes blobs that nothing else takes."""

    def forward(self, *bottoms: Tensor) -> tuple[Tensor, ...]:
        return ()


def silence(spec: Spec) -> nn.Module:
    return Silence()


LAYERS = {
    "Flatten": Kind(flatten, "flatten_param"),
    "Reshape": Kind(reshape, "reshape_param"),
    "Silence": Kind(silence),
}
