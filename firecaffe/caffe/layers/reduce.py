"""ArgMax, Reduction and Tile.

Source: Caffe's API documentation (caffe.berkeleyvision.org/doxygen), ArgMaxLayer, ReductionLayer
and TileLayer; which of two equal values ArgMax takes was measured.
"""

import math

import torch
from torch import Tensor, nn

from firecaffe.caffe.layers.axis import axis_of, check_bottoms
from firecaffe.caffe.layers.checks import positive
from firecaffe.caffe.layers.spec import Kind, Spec

OPERATIONS = ("", "SUM", "ASUM", "SUMSQ", "MEAN")


class ArgMax(nn.Module):
    """Where the largest values are, or they themselves; of equal ones the last comes first."""

    def __init__(self, top_k: int, axis: int | None, out_max_val: bool) -> None:
        """axis: None flattens each sample, and the top is (B, 1, top_k), or (B, 2, top_k) with the
        values in the second row, with axes of 1 behind it up to the bottom's.
        """
        super().__init__()
        self.top_k, self.axis, self.out_max_val = top_k, axis, out_max_val

    def forward(self, values: Tensor) -> Tensor:
        if self.axis is not None:
            places, largest = self.found(values, self.axis)
            return largest if self.out_max_val else places
        places, largest = self.found(values.flatten(1), 1)
        rows = torch.stack([places, largest][: 2 if self.out_max_val else 1], 1)
        return rows.view(*rows.shape, *[1] * (values.dim() - 3))

    def found(self, values: Tensor, axis: int) -> tuple[Tensor, Tensor]:
        """The places as numbers of the bottom's type, and the values."""
        backward = values.flip(axis)
        if self.top_k == 1:
            largest, places = backward.max(axis, keepdim=True)
        else:
            largest, places = backward.sort(dim=axis, descending=True, stable=True)
        places = values.shape[axis] - 1 - places.narrow(axis, 0, self.top_k)
        return places.to(values.dtype), largest.narrow(axis, 0, self.top_k)


class Reduction(nn.Module):
    """All axes from `axis` on become one number, times a coefficient."""

    def __init__(self, operation: str, axis: int, coeff: float) -> None:
        super().__init__()
        self.operation, self.axis, self.coeff = operation, axis, coeff

    def forward(self, values: Tensor) -> Tensor:
        values = values.flatten(self.axis)
        if self.operation == "MEAN":
            return values.mean(-1) * self.coeff
        if self.operation == "ASUM":
            values = values.abs()
        elif self.operation == "SUMSQ":
            values = values.square()
        return values.sum(-1) * self.coeff


class Tile(nn.Module):
    """The bottom, so many times one behind the other along an axis."""

    def __init__(self, axis: int, tiles: int) -> None:
        super().__init__()
        self.axis, self.tiles = axis, tiles

    def forward(self, values: Tensor) -> Tensor:
        return values.repeat([self.tiles if i == self.axis else 1 for i in range(values.dim())])


def argmax(spec: Spec) -> ArgMax:
    check_bottoms(spec, 1)
    param, bottom = spec.param, spec.bottoms[0]
    axis = axis_of(spec, "axis", 0, spec.bottoms[0]) if param.has("axis") else None
    top_k, most = (
        positive(spec, "top_k", 1),
        math.prod(bottom[1:]) if axis is None else bottom[axis],
    )
    if top_k > most:
        raise param.error(
            f"top_k is {top_k}; {spec.name!r} has {most} values to choose from",
            param.line_of("top_k"),
        )
    return ArgMax(top_k, axis, param.flag("out_max_val"))


def reduction(spec: Spec) -> Reduction:
    check_bottoms(spec, 1)
    return Reduction(
        spec.param.choice("operation", OPERATIONS, "SUM"),
        axis_of(spec, "axis", 0, spec.bottoms[0]),
        spec.param.number("coeff", 1.0),
    )


def tile(spec: Spec) -> Tile:
    check_bottoms(spec, 1)
    return Tile(axis_of(spec, "axis", 1, spec.bottoms[0]), positive(spec, "tiles"))


LAYERS = {
    "ArgMax": Kind(argmax, "argmax_param", ()),
    "Reduction": Kind(reduction, "reduction_param", ()),
    "Tile": Kind(tile, "tile_param", ()),
}
