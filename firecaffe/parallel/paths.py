"""A module of several paths, whose outputs are concatenated: each part has whole paths.

    inputs -> what the paths have in common -> path, path, … -> torch.cat

This is found in `parallel.find_paths`. What paths have in common (the squeeze of a Fire block) is
computed by all ranks. Each part is given a consecutive run of paths, so what the parts make is the
output in parts.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from firecaffe.cluster.agree import gather_text
from firecaffe.parallel.cut import Cut
from firecaffe.parallel.find_paths import Paths, find_paths, share_paths
from firecaffe.parallel.layers import Held, Made, Place, SplitLayer
from firecaffe.parallel.parts import PartGroup
from firecaffe.parallel.tensor import whole


class ByPaths(SplitLayer):
    """Each part has whole paths; all need the inputs."""

    def __init__(self, place: Place, made: Made, common: nn.Module, dim: int) -> None:
        """common: makes what is taken of the inputs. dim: that is concatenated."""
        super().__init__(place, made)
        self.common, self.dim = common, dim
        self._outline: dict[str, Tensor] = {}
        self._is_trained = False
        self._cuts_known: dict[object, Cut] = {}

    def outline(self, layer: nn.Module) -> None:
        """Notes what the whole module has, of which this rank holds some."""
        self._outline = {
            name: torch.empty_like(each, device="meta") for name, each in layer.state_dict().items()
        }
        self._is_trained = any(each.requires_grad for each in layer.parameters())

    def held(self) -> dict[str, Held]:
        own = {
            name: each
            for part in (self.common, *self.parts.values())
            for name, each in part.state_dict(keep_vars=True).items()
        }
        return {
            name: Held([own.get(name, each)], is_elsewhere=name not in own)
            for name, each in self._outline.items()
        }

    def forward(self, *inputs: Any, **options: Any) -> Tensor:
        taken = self.common(*whole(inputs), **whole(options))
        own = self._each(*_copies(self.place.group, taken))
        if torch.is_grad_enabled() and (self._is_trained or any(y.requires_grad for y in own)):
            # A path without weights, too: all ranks must go backward alike.
            own = [y if y.requires_grad else y.detach().requires_grad_() for y in own]
        dim = self.dim % own[0].ndim
        return self._in_parts(own, self._cut(own, dim, taken), dim)

    def _cut(self, own: Sequence[Tensor], dim: int, taken: Sequence[Any]) -> Cut:
        """How the output is cut: ranks tell each other, once for each shape of what is taken."""
        shapes = tuple(each.shape for each in taken if isinstance(each, Tensor))
        if shapes not in self._cuts_known:
            lengths = " ".join(str(each.shape[dim]) for each in own[: len(self.parts)])
            of_all = gather_text(self.place.group.group, lengths)
            ends = accumulate(map(int, " ".join(of_all).split()), initial=0)
            self._cuts_known[shapes] = tuple(ends)
        return self._cuts_known[shapes]


def by_paths(layer: nn.Module, place: Place) -> ByPaths:
    """Each part is a run of paths; the largest is as small as can be."""
    found = find_paths(layer)
    ends = share_paths(layer, found, place.group.num_parts)
    parts = [_part(layer, found, ends[number], ends[number + 1]) for number in place.group.own]
    text = f"{type(layer).__name__} of {len(found.own)} paths"
    made = ByPaths(place, Made(text, parts, {}), _common(layer, found), found.dim)
    made.outline(layer)
    return made.train(layer.training)


def _common(layer: nn.Module, found: Paths) -> fx.GraphModule:
    """Makes what is taken, in a tuple, of the module's inputs."""
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in found.common:
        made[node] = graph.node_copy(node, made.__getitem__)
    graph.output(tuple(made[each] for each in found.taken))
    return fx.GraphModule(layer, graph)


def _part(layer: nn.Module, found: Paths, first: int, last: int) -> fx.GraphModule:
    """Makes the output of paths [first, last) of what is taken."""
    graph = fx.Graph()
    made = {each: graph.placeholder(f"taken_{i}") for i, each in enumerate(found.taken)}
    for node in found.graph.nodes:
        if any(node in path for path in found.own[first:last]):
            made[node] = graph.node_copy(node, made.__getitem__)
    ends = [made[each] for each in found.ends[first:last]]
    graph.output(graph.call_function(torch.cat, (ends, found.dim)))
    return fx.GraphModule(layer, graph)


def _copies(group: PartGroup, taken: Sequence[Any]) -> list[Sequence[Any]]:
    """Of each thing that is taken, one for each of this rank's parts. Tensors are copied together:
    a rank whose paths need one of them goes backward through all.
    """
    tensors = [each for each in taken if isinstance(each, Tensor)]
    copies = _CopyAll.apply(group, *tensors)  # type: ignore[no-untyped-call]
    count = len(copies) // len(tensors)
    by_tensor = iter(_runs(copies, count))
    return [next(by_tensor) if isinstance(each, Tensor) else [each] * count for each in taken]


class _CopyAll(Function):
    """`flow.copy` of several tensors."""

    @staticmethod
    def forward(ctx: Any, group: PartGroup, *wholes: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(copy for each in wholes for copy in group.copies(each))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[1:]
        count = len(gradients) // len(wanted)
        return None, *(
            ctx.group.sum(own) if is_wanted else None
            for own, is_wanted in zip(_runs(gradients, count), wanted, strict=True)
        )


def _runs(values: Sequence[Any], length: int) -> list[Sequence[Any]]:
    return [values[start : start + length] for start in range(0, len(values), length)]
