"""Layers that combine, split or reduce blobs: Eltwise, Concat, Slice, ArgMax, Tile and others.

BatchReindex and Filter select samples by a second bottom. Source: Caffe's API documentation
(caffe.berkeleyvision.org/doxygen), ArgMaxLayer, BatchReindexLayer, FilterLayer, ReductionLayer and
TileLayer. ArgMax's choice between equal values was measured.
"""

import math
from functools import reduce
from itertools import pairwise

import torch
from torch import Tensor, nn

from firecaffe.caffe.layers.spec import Function, Kind, Spec, shown


def _product(*bottoms: Tensor) -> Tensor:
    return reduce(torch.mul, bottoms)


def _sum(first: Tensor, *others: Tensor, coefficients: list[float]) -> Tensor:
    coefficient, *further = coefficients
    total = first if coefficient == 1 else first * coefficient
    for value, coefficient in zip(others, further, strict=True):
        total = torch.add(total, value, alpha=coefficient)
    return total


def _maximum(largest: Tensor, *others: Tensor) -> Tensor:
    # As in Caffe, a tie's gradient goes to one bottom; torch splits it.
    for place, value in enumerate(others):
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
        return Function(_sum, coefficients=coefficients or [1.0] * len(spec.bottoms))
    return Function(_product if operation == "PROD" else _maximum)


def _concat(*bottoms: Tensor, axis: int) -> Tensor:
    return torch.cat(bottoms, axis)


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
    return Function(_concat, axis=axis)


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
    elif spec.num_tops < 1 or size % spec.num_tops:
        raise spec.error(
            f" cuts axis {axis}, of {size}, in {spec.num_tops} tops; expected "
            "equal parts, or slice_point"
        )
    else:
        sizes = [size // spec.num_tops] * spec.num_tops
    return Function(torch.split, split_size_or_sections=sizes, dim=axis)


def _copies(x: Tensor, count: int) -> tuple[Tensor, ...]:
    return (x,) * count


def split(spec: Spec) -> nn.Module:
    return Function(_copies, count=spec.num_tops)


OPERATIONS = ("", "SUM", "ASUM", "SUMSQ", "MEAN")


def _argmax(values: Tensor, top_k: int, axis: int | None, out_max_val: bool) -> Tensor:
    """Return indices of the largest values, or the values. Of equal values, the last is first.

    Without an axis, each sample is flattened. The top is (B, 1, top_k), or (B, 2, top_k) with the
    values in the second row, followed by axes of size 1 up to the bottom's number of axes.
    """
    if axis is not None:
        places, largest = _largest(values, axis, top_k)
        return largest if out_max_val else places
    places, largest = _largest(values.flatten(1), 1, top_k)
    rows = torch.stack([places, largest][: 2 if out_max_val else 1], 1)
    return rows.view(*rows.shape, *[1] * (values.dim() - 3))


def _largest(values: Tensor, axis: int, top_k: int) -> tuple[Tensor, Tensor]:
    backward = values.flip(axis)
    if top_k == 1:
        largest, places = backward.max(axis, keepdim=True)
    else:
        largest, places = backward.sort(dim=axis, descending=True, stable=True)
    places = values.shape[axis] - 1 - places.narrow(axis, 0, top_k)
    return places.to(values.dtype), largest.narrow(axis, 0, top_k)


def _reduced(values: Tensor, operation: str, axis: int, coeff: float) -> Tensor:
    values = values.flatten(axis)
    if operation == "MEAN":
        return values.mean(-1) * coeff
    if operation == "ASUM":
        values = values.abs()
    elif operation == "SUMSQ":
        values = values.square()
    return values.sum(-1) * coeff


def argmax(spec: Spec) -> Function:
    param, bottom = spec.param, spec.bottoms[0]
    axis = spec.axis("axis", 0) if param.has("axis") else None
    top_k = spec.positive("top_k", 1)
    most = math.prod(bottom[1:]) if axis is None else bottom[axis]
    if top_k > most:
        raise param.error(
            f"top_k is {top_k}; {spec.name!r} has {most} values to choose from", "top_k"
        )
    return Function(_argmax, top_k=top_k, axis=axis, out_max_val=param.flag("out_max_val"))


def reduction(spec: Spec) -> Function:
    return Function(
        _reduced,
        operation=spec.param.choice("operation", OPERATIONS, "SUM"),
        axis=spec.axis("axis", 0),
        coeff=spec.param.number("coeff", 1.0),
    )


def tile(spec: Spec) -> Function:
    times = [1] * len(spec.bottoms[0])
    times[spec.axis("axis", 1)] = spec.positive("tiles")
    return Function(torch.tile, dims=times)


def _selected(values: Tensor, places: Tensor) -> Tensor:
    """Select samples of (B, …) by indices (N,) in the batch. A sample may occur several times."""
    return values[places.long()]


def _filtered(*bottoms: Tensor) -> Tensor | tuple[Tensor, ...]:
    """Keep the samples for which the last bottom, (B, 1, …), is not 0; on the meta device, all."""
    *values, selector = bottoms
    if not selector.is_meta:
        chosen = selector.flatten() != 0
        values = [value[chosen] for value in values]
    return values[0] if len(values) == 1 else tuple(values)


def batch_reindex(spec: Spec) -> Function:
    spec.check_axes(1, bottom=1)
    return Function(_selected)


def filtered(spec: Spec) -> Function:
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
    return Function(_filtered)


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
