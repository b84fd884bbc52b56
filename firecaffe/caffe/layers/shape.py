"""Flatten, Reshape, Silence, Permute, Reverse and ShuffleChannel.

Sources: SSD's fork (github.com/weiliu89/caffe) for Permute, where axes that `order` does not name
follow in their order; ShuffleNet (arXiv 1707.01083, section 3.1) for ShuffleChannel.
"""

import math

import torch
from torch import Tensor, nn

from firecaffe.caffe.layers.spec import Function, Kind, Spec, shown


def flatten(spec: Spec) -> nn.Module:
    return nn.Flatten(spec.axis("axis", 1), spec.axis("end_axis", -1))


def _reshaped(x: Tensor, sizes: list[int], start: int, stop: int) -> Tensor:
    """Reshape the axes from `start` to `stop`: 0 keeps a size, and one -1 is inferred."""
    sizes = [x.shape[start + place] if size == 0 else size for place, size in enumerate(sizes)]
    return x.reshape(*x.shape[:start], *sizes, *x.shape[stop:])


def reshape(spec: Spec) -> nn.Module:
    param, bottom = spec.param, spec.bottoms[0]
    start = spec.axis("axis", 0, end=1)
    count = param.integer("num_axes", -1)
    stop = len(bottom) if count == -1 else start + count
    sizes = param.message("shape").integers("dim")
    behind = bottom[start:]
    given = [behind[n] if size == 0 and n < len(behind) else size for n, size in enumerate(sizes)]
    whole, known = math.prod(bottom[start:stop]), math.prod(size for size in given if size != -1)
    fits = known > 0 and (whole % known == 0 if -1 in sizes else whole == known)
    if stop > len(bottom) or sizes.count(-1) > 1 or any(s < -1 for s in sizes) or not fits:
        raise spec.error(
            f" makes {shown(sizes)} of axes {start} to {stop} of "
            f"{shown(bottom)}; expected as many elements, and at most one -1"
        )
    # The actual batch differs from the file's: each of several workers has a part of it.
    if start == 0 and -1 not in sizes[:1] and sizes and sizes[0] == bottom[0]:
        sizes = [0, *sizes[1:]]
    return Function(_reshaped, sizes=sizes, start=start, stop=stop)


def _nothing(*bottoms: Tensor) -> tuple[Tensor, ...]:
    return ()


def silence(spec: Spec) -> nn.Module:
    return Function(_nothing)


def _permuted(values: Tensor, order: list[int]) -> Tensor:
    return values.permute(order).contiguous()


def _shuffled(values: Tensor, groups: int) -> Tensor:
    """Reorder channels of (B, groups · n, …): g · n + i becomes i · groups + g."""
    batch, channels, *rest = values.shape
    grouped = values.reshape(batch, groups, channels // groups, *rest)
    return grouped.transpose(1, 2).reshape(values.shape)


def permute(spec: Spec) -> Function:
    order, axes = spec.param.integers("order"), len(spec.bottoms[0])
    if len(set(order)) < len(order) or not all(0 <= axis < axes for axis in order):
        raise spec.param.error(
            f"order is {', '.join(map(str, order))}; expected axes from 0 to {axes - 1}, each once",
            "order",
        )
    order += [axis for axis in range(axes) if axis not in order]
    return Function(_permuted, order=order)


def reverse(spec: Spec) -> Function:
    return Function(torch.flip, dims=[spec.axis("axis", 0)])


def shuffle_channel(spec: Spec) -> Function:
    groups, channels = spec.positive("group", 1), spec.bottoms[0][1]
    if channels % groups:
        raise spec.param.error(
            f"group is {groups}; the bottom of {spec.name!r} has {channels} channels, which it "
            "does not divide",
            "group",
        )
    return Function(_shuffled, groups=groups)


LAYERS = {
    "Flatten": Kind(flatten, "flatten_param"),
    "Reshape": Kind(reshape, "reshape_param"),
    "Silence": Kind(silence, bottoms=()),
    "Permute": Kind(permute, "permute_param", ()),
    "Reverse": Kind(reverse, "reverse_param", ()),
    "ShuffleChannel": Kind(shuffle_channel, "shuffle_channel_param", ()),
}
