"""Layers that order axes, channels or entries anew: Permute, Reverse, ShuffleChannel.

Sources: Permute, SSD's fork (github.com/weiliu89/caffe): axes that `order` does not name follow in
their order. ShuffleChannel, ShuffleNet (arXiv 1707.01083, section 3.1).
"""

from collections.abc import Sequence

from torch import Tensor, nn

from firecaffe.caffe.layers.axis import axis_of, check_bottoms
from firecaffe.caffe.layers.checks import positive
from firecaffe.caffe.layers.spec import Kind, Spec


class Permute(nn.Module):
    """Axis i of the top is axis order[i] of the bottom."""

    def __init__(self, order: Sequence[int]) -> None:
        super().__init__()
        self.order = tuple(order)

    def forward(self, values: Tensor) -> Tensor:
        return values.permute(self.order).contiguous()


class Reverse(nn.Module):
    """The entries along one axis, last to first."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, values: Tensor) -> Tensor:
        return values.flip(self.axis)


class ShuffleChannel(nn.Module):
    """(B, groups · n, …): channel g · n + i becomes channel i · groups + g."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.groups = groups

    def forward(self, values: Tensor) -> Tensor:
        batch, channels, *rest = values.shape
        grouped = values.reshape(batch, self.groups, channels // self.groups, *rest)
        return grouped.transpose(1, 2).reshape(values.shape)


def permute(spec: Spec) -> Permute:
    check_bottoms(spec, 1)
    order, axes = spec.param.integers("order"), len(spec.bottoms[0])
    if len(set(order)) < len(order) or not all(0 <= axis < axes for axis in order):
        raise spec.param.error(
            f"order is {', '.join(map(str, order))}; expected axes from 0 to {axes - 1}, each once",
            spec.param.line_of("order"),
        )
    return Permute([*order, *(axis for axis in range(axes) if axis not in order)])


def reverse(spec: Spec) -> Reverse:
    check_bottoms(spec, 1)
    return Reverse(axis_of(spec, "axis", 0, spec.bottoms[0]))


def shuffle_channel(spec: Spec) -> ShuffleChannel:
    check_bottoms(spec, 1)
    groups, channels = positive(spec, "group", 1), spec.bottoms[0][1]
    if channels % groups:
        raise spec.param.error(
            f"group is {groups}; the bottom of {spec.name!r} has {channels} channels, which it "
            "does not divide",
            spec.param.line_of("group"),
        )
    return ShuffleChannel(groups)


LAYERS = {
    "Permute": Kind(permute, "permute_param", ()),
    "Reverse": Kind(reverse, "reverse_param", ()),
    "ShuffleChannel": Kind(shuffle_channel, "shuffle_channel_param", ()),
}
