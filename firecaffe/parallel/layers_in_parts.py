"""Layers that are split: a rank holds some parts, each a smaller layer of the same kind.

- `ByOutputs`: each part needs the whole input and makes some of the outputs (rows of a weight).
- `ByInputs`: each part needs some of the input; the outputs are the sum over parts (columns).
- `ByBoth`: each part needs some of the input and makes the same part of the output (the groups of
  a grouped convolution, the channels of a batch normalization); nothing is exchanged.
- `OverRows`: images are in parts of rows, and all ranks hold the weights, whose gradients are
  summed over parts, in the order of the tree.

Outputs in parts are passed on as a `TensorInParts`. A layer over parts uses it directly.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firecaffe.errors import RecipeError
from firecaffe.parallel import flow
from firecaffe.parallel.cut import Cut, Slide, check_num_rows, cut, padding_of
from firecaffe.parallel.flow import PartGroup
from firecaffe.parallel.own_samples import OwnSamples
from firecaffe.parallel.rows import input_rows_of
from firecaffe.parallel.tensor import TensorInParts, copies_of, parts_of

Piece = tuple[int, range]
"""Consecutive elements of a dimension of a tensor: the dimension, and their range."""


@dataclass(frozen=True)
class HeldShare:
    """This rank's share of a tensor of the whole layer."""

    own: Sequence[Tensor]
    """The rank's parts, or the tensor itself if all ranks have it."""
    dim: int = 0
    cut: Cut = ()
    """The cut of dimension `dim`; empty if it is not cut."""
    is_elsewhere: bool = False
    """Whether other ranks have it; `own` is then its outline on the meta device."""


@dataclass(frozen=True)
class SplitPlace:
    """A layer to be split: its name, its kind of split, and the ranks that hold it."""

    name: str
    word: str
    group: PartGroup
    pieces: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)
    """This rank's parts of tensors, by name, if the layer has stand-ins (shapes without data)."""


@dataclass(frozen=True)
class MadeParts:
    text: str
    parts: Sequence[nn.Module]
    cuts: Mapping[str, tuple[int, Cut]]
    """For each tensor of the layer that is cut, the dimension and the cut."""


class SplitLayer(nn.Module):
    def __init__(self, place: SplitPlace, made: MadeParts) -> None:
        super().__init__()
        self.place, self._text, self._cuts = place, made.text, made.cuts
        self.parts = nn.ModuleDict(
            {str(number): part for number, part in zip(place.group.own, made.parts, strict=True)}
        )

    def held(self) -> dict[str, HeldShare]:
        parts = [part.state_dict(keep_vars=True) for part in self.parts.values()]
        by_name = {}
        for name in parts[0]:
            dim, cut = self._cuts.get(name, (0, ()))
            tensors = [part[name] for part in parts]
            by_name[name] = HeldShare(tensors, dim, cut)
        return by_name

    def extra_repr(self) -> str:
        numbers = self.place.group.own
        return (
            f"{self._text} by {self.place.word}, "
            f"parts {numbers.start} to {numbers.stop - 1} of {self.place.group.num_parts}"
        )

    def _each(self, *inputs: Sequence[Any]) -> list[Tensor]:
        group, parts = self.place.group, list(self.parts.values())
        return [
            group.call(parts[number % len(parts)], number, *taken)
            for number, taken in enumerate(zip(*inputs, strict=True))
        ]

    def _in_parts(self, own: Sequence[Tensor], cut: Cut, dim: int) -> TensorInParts:
        return TensorInParts(self.place.group, own, cut, dim, self.place.name)

    def _taken(self, x: Tensor, cut: Cut, dim: int) -> Sequence[Tensor]:
        if x.shape[dim] != cut[-1]:
            raise RecipeError(
                f"split: {self.place.name} takes {cut[-1]} inputs; it was given {x.shape[dim]} "
                f"(shape {tuple(x.shape)})"
            )
        return parts_of(x, self.place.group, cut, dim)


class ByOutputs(SplitLayer):
    """A layer whose parts need the whole input. `cut` and `dim` (from the end) are of outputs."""

    def __init__(self, place: SplitPlace, made: MadeParts, cut: Cut, dim: int) -> None:
        super().__init__(place, made)
        self.cut, self.dim = cut, dim

    def forward(self, x: Tensor) -> Tensor:
        output_parts = self._each(copies_of(x, self.place.group))
        return self._in_parts(output_parts, self.cut, output_parts[0].ndim + self.dim)


class ByInputs(SplitLayer):
    """A layer that sums over parts. `cut` and `dim` (from the end) are of the inputs."""

    def __init__(
        self, place: SplitPlace, made: MadeParts, cut: Cut, dim: int, bias: nn.Parameter | None
    ) -> None:
        super().__init__(place, made)
        self.cut, self.dim = cut, dim
        self.bias = bias  # all ranks hold it

    def held(self) -> dict[str, HeldShare]:
        return super().held() | ({} if self.bias is None else {"bias": HeldShare([self.bias])})

    def forward(self, x: Tensor) -> Tensor:
        taken = self._taken(x, self.cut, x.ndim + self.dim)
        output_parts = self._each(taken)
        y = flow.add(self.place.group, output_parts)
        if self.bias is None:
            return y
        # Under autocast, the sum has a shorter type than the bias, as in a whole layer.
        return y + self.bias.to(y.dtype).view(-1, *[1] * (-self.dim - 1))


class ByBoth(SplitLayer):
    """A layer whose parts use their own input. `dim` is cut: from the end, or 1 for the second."""

    def __init__(
        self, place: SplitPlace, made: MadeParts, inputs: Cut, outputs: Cut, dim: int
    ) -> None:
        super().__init__(place, made)
        self.inputs, self.outputs, self.dim = inputs, outputs, dim

    def forward(self, x: Tensor) -> Tensor:
        dim = self.dim % x.ndim
        taken = self._taken(x, self.inputs, dim)
        output_parts = self._each(taken)
        return self._in_parts(output_parts, self.outputs, dim)


class OverRows(nn.Module):
    def __init__(self, layer: Any, place: SplitPlace) -> None:
        super().__init__()
        self.place, self._text = place, str(layer)
        self.weight, self.bias = layer.weight, layer.bias

    def extra_repr(self) -> str:
        return f"{self._text} by rows, in {self.place.group.num_parts} parts"

    def _in_rows(self, x: Tensor, outputs: int) -> TensorInParts:
        group, dim = self.place.group, x.ndim - 2
        rows = x.shape[dim]
        check_num_rows(self.place.name, rows, outputs, group.num_parts)
        ends = cut(rows, group.num_parts)
        return TensorInParts(group, parts_of(x, group, ends, dim), ends, dim, self.place.name)

    def _copies(self, tensor: Tensor | None) -> Sequence[Any]:
        group = self.place.group
        return [None] * len(group.own) if tensor is None else flow.copy(group, tensor)


class ConvOverRows(OverRows):
    def __init__(self, layer: nn.Conv2d, place: SplitPlace) -> None:
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
        ends, seen = input_rows_of(in_rows, self._slide, 0.0)
        weights, biases = self._copies(self.weight), self._copies(self.bias)
        output_parts = [
            F.conv2d(F.pad(part, self._columns), weight, bias, *self._rest)
            for part, weight, bias in zip(seen, weights, biases, strict=True)
        ]
        return in_rows.with_parts(output_parts, ends)


class NormOverRows(OverRows):
    """A BatchNorm2d whose statistics are over all parts."""

    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

    def __init__(self, layer: nn.BatchNorm2d, place: SplitPlace) -> None:
        super().__init__(layer, place)
        self.eps, self.momentum = layer.eps, layer.momentum
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(layer, name))

    def forward(self, x: Tensor) -> Tensor:
        in_rows = self._in_rows(x, x.shape[-2])
        parts = in_rows.own
        if self.training or self.running_mean is None or self.running_var is None:
            means, variances = self._statistics(in_rows)
        else:
            means, variances = [self.running_mean] * len(parts), [self.running_var] * len(parts)
        weights, biases = self._copies(self.weight), self._copies(self.bias)
        made = []
        for number, y in enumerate(parts):
            scale, bias = (variances[number] + self.eps).rsqrt(), biases[number]
            if weights[number] is not None:
                scale = scale * weights[number]
            z = (y - _of(means[number])) * _of(scale)
            made.append((z if bias is None else z + _of(bias)).to(y.dtype))
        return in_rows.with_parts(made)

    def _statistics(self, x: TensorInParts) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        group, count = self.place.group, x.numel() // x.shape[1]
        mean = flow.add(group, [_sum(part) for part in x.own]) / count
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


def over_rows(layer: nn.Module, place: SplitPlace) -> OverRows:
    made: type[Any] = ConvOverRows if isinstance(layer, nn.Conv2d) else NormOverRows
    if isinstance(place.group, OwnSamples):
        raise RecipeError(
            f"split: {place.name} cannot be split by rows if each rank has its own samples"
        )
    over: OverRows = made(layer, place).train(layer.training)
    return over


def check_row_counts(
    network: nn.Module, names: Iterable[str], num_parts: int, call: Callable[[], object]
) -> None:
    """Call the whole network. Raises: RecipeError if a layer by rows sees fewer rows than parts."""
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
        check_num_rows(name, rows, outputs, num_parts)


def check_padding(name: str, layer: nn.Module) -> None:
    mode = getattr(layer, "padding_mode", "zeros")
    if mode != "zeros":
        raise RecipeError(
            f"split: {name} has padding_mode {mode!r}; by rows it can be 'zeros' alone, so leave "
            f"{name} out of split"
        )


def _sum(x_BCHW: Tensor) -> Tensor:
    # For each channel, in float32 at least.
    return x_BCHW.to(torch.promote_types(x_BCHW.dtype, torch.float32)).sum((0, 2, 3))


def _of(x_C: Tensor) -> Tensor:
    return x_C.view(-1, 1, 1)
