"""Layers that combine, split or reduce blobs: Eltwise, Concat, Slice, ArgMax, Tile and others.

BatchReindex and Filter select samples by a second bottom. Source: Caffe's API documentation
(caffe.berkeleyvision.org/doxygen), ArgMaxLayer, BatchReindexLayer, FilterLayer, ReductionLayer and
TileLayer. ArgMax's choice between equal values was measured.
"""

import math
from itertools import pairwise

import torch
from torch import Tensor, nn

from firecaffe.caffe.layers.spec import Kind, Spec, shown


class Product(nn.Module):
    def forward(self, first: Tensor, *others: Tensor) -> Tensor:
        product = first
        for other in others:
            product = product * other
        return product


class Sum(nn.Module):
    def __init__(self, coefficients: list[float]) -> None:
        super().__init__()
        self.coefficients = coefficients

    def forward(self, first: Tensor, *others: Tensor) -> Tensor:
        coefficient, *further = self.coefficients
        total = first if coefficient == 1 else first * coefficient
        for value, coefficient in zip(others, further, strict=True):
            total = torch.add(total, value, alpha=coefficient)
        return total

    def extra_repr(self) -> str:
        return ", ".join(f"{coefficient:g}" for coefficient in self.coefficients)


class Maximum(nn.Module):
    """Element-wise maximum. As in Caffe, a tie's gradient goes to one bottom; torch splits it."""

    def forward(self, first: Tensor, *others: Tensor) -> Tensor:
        largest, *further = first, *others
        for place, value in enumerate(further):
            stays = largest > value if place == 0 else largest >= value
            largest = torch.where(stays, largest, value)
        return largest


def eltwise(spec: Spec) -> nn.Module:
    if len(spec.bottoms) < 2 or len(set(spec.bottoms)) > 1:
        raise spec.error(
            f" has bottoms of {', '.join(map(shown, spec.bottoms))}; expected "
            "two or more of the same shape"
        )
    param = spec.param
    operation = param.choice("operation", ("PROD", "SUM", "MAX"), "SUM")
    coefficients = param.numbers("coeff")
    if coefficients and len(coefficients) != len(spec.bottoms):
        raise spec.error(f" has {len(coefficients)} coeff for {len(spec.bottoms)} bottoms", "coeff")
    if coefficients and operation == "PROD":
        raise spec.error(": coeff are for SUM, not for PROD", "coeff")
    if operation == "SUM":
        return Sum(coefficients or [1.0] * len(spec.bottoms))
    return Product() if operation == "PROD" else Maximum()


class Concat(nn.Module):
    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, *bottoms: Tensor) -> Tensor:
        return torch.cat(bottoms, self.axis)

    def extra_repr(self) -> str:
        return f"axis={self.axis}"


def concat(spec: Spec) -> nn.Module:
    if not spec.bottoms:
        raise spec.error(" has no bottom")
    word = "concat_dim" if spec.param.has("concat_dim") else "axis"
    axis = spec.axis(word, 1)
    others = {(*shape[:axis], *shape[axis + 1 :]) for shape in spec.bottoms}
    if len(others) > 1 or len({len(shape) for shape in spec.bottoms}) > 1:
        raise spec.error(
            f" has bottoms of {', '.join(map(shown, spec.bottoms))}; expected "
            f"shapes that differ along axis {axis} alone"
        )
    return Concat(axis)


class Slice(nn.Module):
    def __init__(self, axis: int, sizes: list[int]) -> None:
        super().__init__()
        self.axis, self.sizes = axis, sizes

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return torch.split(x, self.sizes, self.axis)

    def extra_repr(self) -> str:
        return f"axis={self.axis}, sizes={self.sizes}"


def slice_(spec: Spec) -> nn.Module:
    param, bottom = spec.param, spec.bottoms[0]
    axis = spec.axis("slice_dim" if param.has("slice_dim") else "axis", 1)
    size, points = bottom[axis], param.integers("slice_point")
    if points:
        ends = [0, *points, size]
        if len(points) != spec.num_tops - 1 or ends != sorted(set(ends)):
            raise spec.error(
                f" cuts {size} at {', '.join(map(str, points))} for "
                f"{spec.num_tops} tops; expected rising points between, one less than tops",
                "slice_point",
            )
        sizes = [end - start for start, end in pairwise(ends)]
        return Slice(axis, sizes)
    if spec.num_tops < 1 or size % spec.num_tops:
        raise spec.error(
            f" cuts axis {axis}, of {size}, in {spec.num_tops} tops; expected "
            "equal parts, or slice_point"
        )
    return Slice(axis, [size // spec.num_tops] * spec.num_tops)


class SplitCopies(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x,) * self.count


def split(spec: Spec) -> nn.Module:
    return SplitCopies(spec.num_tops)


OPERATIONS = ("", "SUM", "ASUM", "SUMSQ", "MEAN")


class ArgMax(nn.Module):
    """Indices of the largest values, or the values themselves. Of equal values, the last is first.

    Without an axis, each sample is flattened. The top is (B, 1, top_k), or (B, 2, top_k) with the
    values in the second row, followed by axes of size 1 up to the bottom's number of axes.
    """

    def __init__(self, top_k: int, axis: int | None, out_max_val: bool) -> None:
        super().__init__()
        self.top_k, self.axis, self.out_max_val = top_k, axis, out_max_val

    def forward(self, values: Tensor) -> Tensor:
        if self.axis is not None:
            places, largest = self.largest(values, self.axis)
            return largest if self.out_max_val else places
        places, largest = self.largest(values.flatten(1), 1)
        rows = torch.stack([places, largest][: 2 if self.out_max_val else 1], 1)
        return rows.view(*rows.shape, *[1] * (values.dim() - 3))

    def largest(self, values: Tensor, axis: int) -> tuple[Tensor, Tensor]:
        backward = values.flip(axis)
        if self.top_k == 1:
            largest, places = backward.max(axis, keepdim=True)
        else:
            largest, places = backward.sort(dim=axis, descending=True, stable=True)
        places = values.shape[axis] - 1 - places.narrow(axis, 0, self.top_k)
        return places.to(values.dtype), largest.narrow(axis, 0, self.top_k)


class Reduction(nn.Module):
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
    def __init__(self, axis: int, tiles: int) -> None:
        super().__init__()
        self.axis, self.tiles = axis, tiles

    def forward(self, values: Tensor) -> Tensor:
        return values.repeat([self.tiles if i == self.axis else 1 for i in range(values.dim())])


def argmax(spec: Spec) -> ArgMax:
    param, bottom = spec.param, spec.bottoms[0]
    axis = spec.axis("axis", 0) if param.has("axis") else None
    top_k = spec.positive("top_k", 1)
    most = math.prod(bottom[1:]) if axis is None else bottom[axis]
    if top_k > most:
        raise param.error(
            f"top_k is {top_k}; {spec.name!r} has {most} values to choose from", "top_k"
        )
    return ArgMax(top_k, axis, param.flag("out_max_val"))


def reduction(spec: Spec) -> Reduction:
    return Reduction(
        spec.param.choice("operation", OPERATIONS, "SUM"),
        spec.axis("axis", 0),
        spec.param.number("coeff", 1.0),
    )


def tile(spec: Spec) -> Tile:
    return Tile(spec.axis("axis", 1), spec.positive("tiles"))


class BatchReindex(nn.Module):
    """Select samples of (B, …) by indices (N,) in the batch. A sample may occur several times."""

    def forward(self, values: Tensor, places: Tensor) -> Tensor:
        return values[places.long()]


class Filter(nn.Module):
    """Keep the samples for which the last bottom, (B, 1, …), is not 0; on the meta device, all."""

    def forward(self, *bottoms: Tensor) -> Tensor | tuple[Tensor, ...]:
        *values, selector = bottoms
        if not selector.is_meta:
            chosen = selector.flatten() != 0
            values = [value[chosen] for value in values]
        return values[0] if len(values) == 1 else tuple(values)


def batch_reindex(spec: Spec) -> BatchReindex:
    spec.check_axes(1, bottom=1)
    return BatchReindex()


def filtered(spec: Spec) -> Filter:
    spec.check_tops(len(spec.bottoms) - 1)
    *values, selector = spec.bottoms
    if not values or any(size != 1 for size in selector[1:]):
        raise spec.error(
            f" chooses by {tuple(selector)}; expected (B, 1, …) behind what is chosen from"
        )
    for value in values:
        if value[0] != selector[0]:
            raise spec.error(
                f" chooses among {value[0]} samples by {selector[0]}; expected as many"
            )
    return Filter()


LAYERS = {
    "Concat": Kind(concat, "concat_param", bottoms=()),
    "Eltwise": Kind(eltwise, "eltwise_param", bottoms=(), ignored=("stable_prod_grad",)),
    "Slice": Kind(slice_, "slice_param"),
    "Split": Kind(split),
    "ArgMax": Kind(argmax, "argmax_param", ()),
    "Reduction": Kind(reduction, "reduction_param", ()),
    "Tile": Kind(tile, "tile_param", ()),
    "BatchReindex": Kind(batch_reindex, "", (), bottoms=(2,)),
    "Filter": Kind(filtered, "", (), bottoms=()),
}
