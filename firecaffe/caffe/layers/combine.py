"""Eltwise, Concat, Slice and Split: several blobs to one, one to several."""

from itertools import pairwise

import torch
from torch import Tensor, nn

from firecaffe.caffe.layers.axis import axis_of, check_bottoms, shown
from firecaffe.caffe.layers.spec import Kind, Spec


class Product(nn.Module):
    """Element by element."""

    def forward(self, first: Tensor, *others: Tensor) -> Tensor:
        product = first
        for each in others:
            product = product * each
        return product


class Sum(nn.Module):
    """Element by element, each bottom times its coefficient."""

    def __init__(self, coefficients: list[float]) -> None:
        super().__init__()
        self.coefficients = coefficients

    def forward(self, first: Tensor, *others: Tensor) -> Tensor:
        coefficient, *further = self.coefficients
        total = first if coefficient == 1 else first * coefficient
        for each, coefficient in zip(others, further, strict=True):
            total = torch.add(total, each, alpha=coefficient)
        return total

    def extra_repr(self) -> str:
        return ", ".join(f"{each:g}" for each in self.coefficients)


class Maximum(nn.Module):
    """Element by element. Of equal ones Caffe's gradient goes to the second, then to those that are
    above; torch.maximum would share it.
    """

    def forward(self, first: Tensor, *others: Tensor) -> Tensor:
        largest, *further = first, *others
        for place, each in enumerate(further):
            stays = largest > each if place == 0 else largest >= each
            largest = torch.where(stays, largest, each)
        return largest


def eltwise(spec: Spec) -> nn.Module:
    if len(spec.bottoms) < 2 or len(set(spec.bottoms)) > 1:
        raise spec.layer.error(
            f"Eltwise {spec.name!r} has bottoms of {', '.join(map(shown, spec.bottoms))}; expected "
            "two or more of the same shape"
        )
    param = spec.param
    param.ignore("stable_prod_grad")
    operation = param.choice("operation", ("PROD", "SUM", "MAX"), "SUM")
    coefficients = param.numbers("coeff")
    if coefficients and len(coefficients) != len(spec.bottoms):
        raise spec.layer.error(
            f"Eltwise {spec.name!r} has {len(coefficients)} coeff for {len(spec.bottoms)} bottoms",
            param.line_of("coeff"),
        )
    if coefficients and operation == "PROD":
        raise spec.layer.error(
            f"Eltwise {spec.name!r}: coeff are for SUM, not for PROD", param.line_of("coeff")
        )
    if operation == "SUM":
        return Sum(coefficients or [1.0] * len(spec.bottoms))
    return Product() if operation == "PROD" else Maximum()


class Concat(nn.Module):
    """One behind the other along an axis."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, *bottoms: Tensor) -> Tensor:
        return torch.cat(bottoms, self.axis)

    def extra_repr(self) -> str:
        return f"axis={self.axis}"


def concat(spec: Spec) -> nn.Module:
    if not spec.bottoms:
        raise spec.layer.error(f"Concat {spec.name!r} has no bottom")
    word = "concat_dim" if spec.param.has("concat_dim") else "axis"
    axis = axis_of(spec, word, 1, spec.bottoms[0])
    others = {(*shape[:axis], *shape[axis + 1 :]) for shape in spec.bottoms}
    if len(others) > 1 or len({len(shape) for shape in spec.bottoms}) > 1:
        raise spec.layer.error(
            f"Concat {spec.name!r} has bottoms of {', '.join(map(shown, spec.bottoms))}; expected "
            f"shapes that differ along axis {axis} alone"
        )
    return Concat(axis)


class Slice(nn.Module):
    """Parts along an axis, cut at the points; without points, `parts` equal ones."""

    def __init__(self, axis: int, sizes: list[int]) -> None:
        super().__init__()
        self.axis, self.sizes = axis, sizes

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return torch.split(x, self.sizes, self.axis)

    def extra_repr(self) -> str:
        return f"axis={self.axis}, sizes={self.sizes}"


def slice_(spec: Spec) -> nn.Module:
    check_bottoms(spec, 1)
    param, bottom = spec.param, spec.bottoms[0]
    axis = axis_of(spec, "slice_dim" if param.has("slice_dim") else "axis", 1, bottom)
    size, points = bottom[axis], param.integers("slice_point")
    if points:
        ends = [0, *points, size]
        if len(points) != spec.num_tops - 1 or ends != sorted(set(ends)):
            raise spec.layer.error(
                f"Slice {spec.name!r} cuts {size} at {', '.join(map(str, points))} for "
                f"{spec.num_tops} tops; expected rising points between, one less than tops",
                param.line_of("slice_point"),
            )
        sizes = [end - start for start, end in pairwise(ends)]
        return Slice(axis, sizes)
    if spec.num_tops < 1 or size % spec.num_tops:
        raise spec.layer.error(
            f"Slice {spec.name!r} cuts axis {axis}, of {size}, in {spec.num_tops} tops; expected "
            "equal parts, or slice_point"
        )
    return Slice(axis, [size // spec.num_tops] * spec.num_tops)


class Split(nn.Module):
    """The same blob under several names."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x,) * self.count


def split(spec: Spec) -> nn.Module:
    check_bottoms(spec, 1)
    return Split(spec.num_tops)


LAYERS = {
    "Concat": Kind(concat, "concat_param"),
    "Eltwise": Kind(eltwise, "eltwise_param"),
    "Slice": Kind(slice_, "slice_param"),
    "Split": Kind(split),
}
