"""Layers that are split: this rank's parts, each a smaller layer of the same kind.

Three shapes of work there are:

- `ByOutputs`: each part needs the whole input and makes some of the outputs (rows of a weight).
- `ByInputs`: each part takes some of the input; the outputs are the sum over parts (columns).
- `ByBoth`: each part takes some of the input and makes the same part of the output (the groups of
  a grouped convolution, the channels of a batch normalization); nothing is exchanged.

Outputs in parts go on as a `TensorInParts`; a layer that takes parts takes these as they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from firecaffe.errors import RecipeError
from firecaffe.parallel import flow
from firecaffe.parallel.cut import Cut
from firecaffe.parallel.parts import PartGroup
from firecaffe.parallel.tensor import TensorInParts, copies_of, parts_of

Piece = tuple[int, range]
"""Some consecutive elements of a dimension of a tensor: the dimension, and their numbers."""


@dataclass(frozen=True)
class Held:
    """What this rank holds of a tensor of the whole layer."""

    own: Sequence[Tensor]
    """Its parts; or the tensor itself, if all ranks have it."""
    dim: int = 0
    cut: Cut = ()
    """How dimension `dim` of the tensor is cut; empty if it is not."""
    is_elsewhere: bool = False
    """Whether other ranks have it; `own` is then its outline on the meta device."""


@dataclass(frozen=True)
class Place:
    """A layer to be split: what it is called, and by whom it is held."""

    name: str
    word: str
    group: PartGroup
    pieces: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)
    """This rank's parts of the network's tensors, by names, where the layer has stand-ins for them:
    the right shapes and no numbers. The layer is given them for its own.
    """


@dataclass(frozen=True)
class Made:
    """What was made of a layer."""

    text: str
    """The whole layer, as people read it."""
    parts: Sequence[nn.Module]
    """This rank's."""
    cuts: Mapping[str, tuple[int, Cut]]
    """Of each tensor of the layer that is cut, the dimension and its parts."""


class SplitLayer(nn.Module):
    """A layer of which this rank holds some parts."""

    def __init__(self, place: Place, made: Made) -> None:
        super().__init__()
        self.place, self._text, self._cuts = place, made.text, made.cuts
        self.parts = nn.ModuleDict(
            {str(number): part for number, part in zip(place.group.own, made.parts, strict=True)}
        )

    def held(self) -> dict[str, Held]:
        """What this rank holds of the whole layer's tensors, by their names."""
        parts = [part.state_dict(keep_vars=True) for part in self.parts.values()]
        found = {}
        for name in parts[0]:
            dim, cut = self._cuts.get(name, (0, ()))
            own = [part[name] for part in parts]
            found[name] = Held(own, dim, cut)
        return found

    def extra_repr(self) -> str:
        own = self.place.group.own
        return (
            f"{self._text} by {self.place.word}, "
            f"parts {own.start} to {own.stop - 1} of {self.place.group.num_parts}"
        )

    def _each(self, *inputs: Sequence[Any]) -> list[Tensor]:
        """What each part makes of its inputs, for each micro-batch that there is."""
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
    """Each part needs the whole input."""

    def __init__(self, place: Place, made: Made, cut: Cut, dim: int) -> None:
        """cut: of the outputs. dim: their dimension, from the last."""
        super().__init__(place, made)
        self.cut, self.dim = cut, dim

    def forward(self, x: Tensor) -> Tensor:
        own = self._each(copies_of(x, self.place.group))
        return self._in_parts(own, self.cut, own[0].ndim + self.dim)


class ByInputs(SplitLayer):
    """The outputs are the sum over parts, and the bias."""

    def __init__(
        self, place: Place, made: Made, cut: Cut, dim: int, bias: nn.Parameter | None
    ) -> None:
        """cut: of the inputs. dim: their dimension, and that of the outputs, from the last. bias:
        which all ranks hold.
        """
        super().__init__(place, made)
        self.cut, self.dim = cut, dim
        self.bias = bias

    def held(self) -> dict[str, Held]:
        return super().held() | ({} if self.bias is None else {"bias": Held([self.bias])})

    def forward(self, x: Tensor) -> Tensor:
        taken = self._taken(x, self.cut, x.ndim + self.dim)
        own = self._each(taken)
        y = flow.add(self.place.group, own)
        if self.bias is None:
            return y
        # Under autocast the sum is of a shorter type than the bias, and so is a whole layer's.
        return y + self.bias.to(y.dtype).view(-1, *[1] * (-self.dim - 1))


class ByBoth(SplitLayer):
    """Each part takes its input and makes its output."""

    def __init__(self, place: Place, made: Made, inputs: Cut, outputs: Cut, dim: int) -> None:
        """dim: the dimension that is cut, from the last, or 1 for the second."""
        super().__init__(place, made)
        self.inputs, self.outputs, self.dim = inputs, outputs, dim

    def forward(self, x: Tensor) -> Tensor:
        dim = self.dim % x.ndim
        taken = self._taken(x, self.inputs, dim)
        own = self._each(taken)
        return self._in_parts(own, self.outputs, dim)
