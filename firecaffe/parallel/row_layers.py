"""Layers over images in parts of rows. All ranks hold their weights, whose gradients are summed
over parts, in the order of the tree.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firecaffe.errors import RecipeError
from firecaffe.parallel import flow
from firecaffe.parallel.cut import cut
from firecaffe.parallel.layers import Place
from firecaffe.parallel.own_samples import OwnSamples
from firecaffe.parallel.rows import seen_of
from firecaffe.parallel.slide import Slide, check_enough, padding_of
from firecaffe.parallel.tensor import TensorInParts, parts_of


class OverRows(nn.Module):
    """A layer that has its tensors as they were, and takes images in parts of rows."""

    def __init__(self, layer: Any, place: Place) -> None:
        super().__init__()
        self.place, self._text = place, str(layer)
        self.weight, self.bias = layer.weight, layer.bias

    def extra_repr(self) -> str:
        return f"{self._text} by rows, in {self.place.group.num_parts} parts"

    def _in_rows(self, x: Tensor, outputs: int) -> TensorInParts:
        """Raises: RecipeError if there are fewer rows than parts, of the input or of the output."""
        group, dim = self.place.group, x.ndim - 2
        rows = x.shape[dim]
        check_enough(self.place.name, rows, outputs, group.num_parts)
        ends = cut(rows, group.num_parts)
        return TensorInParts(group, parts_of(x, group, ends, dim), ends, dim, self.place.name)

    def _copies(self, tensor: Tensor | None) -> Sequence[Any]:
        """A tensor of all ranks for each part; None if there is none."""
        group = self.place.group
        return [None] * len(group.own) if tensor is None else flow.copy(group, tensor)


class ConvOverRows(OverRows):
    """A Conv2d."""

    def __init__(self, layer: nn.Conv2d, place: Place) -> None:
        super().__init__(layer, place)
        self._rest = layer.stride, 0, layer.dilation, layer.groups
        rows, columns = (
            (size, step, *pad, apart)
            for size, step, pad, apart in zip(
                layer.kernel_size, layer.stride, padding_of(layer), layer.dilation, strict=True
            )
        )
        self._slide, self._columns = Slide(*rows), columns[2:4]

    def forward(self, x: Tensor) -> Tensor:
        in_rows = self._in_rows(x, self._slide.outputs(x.shape[-2]))
        ends, seen = seen_of(in_rows, self._slide, 0.0)
        weights, biases = self._copies(self.weight), self._copies(self.bias)
        own = [
            F.conv2d(F.pad(each, self._columns), weight, bias, *self._rest)
            for each, weight, bias in zip(seen, weights, biases, strict=True)
        ]
        return in_rows.with_parts(own, ends)


class NormOverRows(OverRows):
    """A BatchNorm2d, whose statistics are over all parts."""

    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

    def __init__(self, layer: nn.BatchNorm2d, place: Place) -> None:
        super().__init__(layer, place)
        self.eps, self.momentum = layer.eps, layer.momentum
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(layer, name))

    def forward(self, x: Tensor) -> Tensor:
        in_rows = self._in_rows(x, x.shape[-2])
        own = in_rows.own
        if self.training or self.running_mean is None or self.running_var is None:
            means, variances = self._statistics(in_rows)
        else:
            means, variances = [self.running_mean] * len(own), [self.running_var] * len(own)
        weights, biases = self._copies(self.weight), self._copies(self.bias)
        made = []
        for number, y in enumerate(own):
            scale, bias = (variances[number] + self.eps).rsqrt(), biases[number]
            if weights[number] is not None:
                scale = scale * weights[number]
            z = (y - _of(means[number])) * _of(scale)
            made.append((z if bias is None else z + _of(bias)).to(y.dtype))
        return in_rows.with_parts(made)

    def _statistics(self, x: TensorInParts) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """The mean and the variance of each channel over all parts, for each of this rank's."""
        group, count = self.place.group, x.numel() // x.shape[1]
        mean = flow.add(group, [_sum(each) for each in x.own]) / count
        means = flow.copy(group, mean)
        apart = [_sum((y - _of(m)).square()) for y, m in zip(x.own, means, strict=True)]
        variance = flow.add(group, apart) / count
        self._track(mean.detach(), variance.detach() * count / max(1, count - 1))
        return means, flow.copy(group, variance)

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor) -> None:
        if not self.training or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        momentum = self.momentum
        by = 1 / float(self.num_batches_tracked) if momentum is None else momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), by)
        self.running_var.lerp_(variance.to(self.running_var.dtype), by)


def over_rows(layer: nn.Module, place: Place) -> OverRows:
    """The layer over rows; one that `check_rows` lets pass."""
    made: type[Any] = ConvOverRows if isinstance(layer, nn.Conv2d) else NormOverRows
    if isinstance(place.group, OwnSamples):
        raise RecipeError(
            f"split: {place.name} cannot be split by rows where ranks have samples of their own"
        )
    over: OverRows = made(layer, place).train(layer.training)
    return over


def check_called(
    network: nn.Module, names: Iterable[str], num_parts: int, call: Callable[[], object]
) -> None:
    """Checks the layers that are to be split by rows, in a call of the whole network.

    Raises: RecipeError if one sees fewer rows than parts.
    """
    seen: dict[str, tuple[int, int]] = {}

    def note(name: str, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen[name] = inputs[0].shape[-2], output.shape[-2]

    hooks = [
        network.get_submodule(name).register_forward_hook(partial(note, name)) for name in names
    ]
    try:
        call()
    finally:
        for hook in hooks:
            hook.remove()
    for name, (rows, outputs) in seen.items():
        check_enough(name, rows, outputs, num_parts)


def check_rows(name: str, layer: nn.Module) -> None:
    """Raises: RecipeError if the padding is not of zeros."""
    mode = getattr(layer, "padding_mode", "zeros")
    if mode != "zeros":
        raise RecipeError(
            f"split: {name} has padding_mode {mode!r}; by rows it can be 'zeros' alone, so leave "
            f"{name} out of split"
        )


def _sum(x_BCHW: Tensor) -> Tensor:
    """Of each channel, in float32 at least."""
    return x_BCHW.to(torch.promote_types(x_BCHW.dtype, torch.float32)).sum((0, 2, 3))


def _of(x_C: Tensor) -> Tensor:
    """Of channels, for images."""
    return x_C.view(-1, 1, 1)
