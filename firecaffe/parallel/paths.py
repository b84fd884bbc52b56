"""A module of several paths, whose outputs are concatenated: each part has whole paths.

    inputs -> what the paths have in common -> path, path, … -> torch.cat

This is found by tracing the module's own `forward`; its layers are not looked into. What paths
have in common (the squeeze of a Fire block) is computed by all ranks. Each part is given a
consecutive run of paths, so what the parts make is the output in parts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from firecaffe.cluster.agree import gather_text
from firecaffe.parallel.cut import Cut, balanced
from firecaffe.parallel.layers import Held, Made, Place, SplitLayer
from firecaffe.parallel.parts import PartGroup
from firecaffe.parallel.tensor import whole

CONCATENATE = (torch.cat, torch.concat, torch.concatenate)

DRAWS = ("dropout", "rand", "bernoulli", "rrelu")
"""What is in the names of functions and layers that draw random numbers."""


class NoPathsError(Exception):
    """A module is not made of paths; its text says why."""


@dataclass(frozen=True)
class Paths:
    """What a module's forward does."""

    graph: fx.Graph
    ends: tuple[fx.Node, ...]
    """What is concatenated: the last node of each path, or a value that it takes as it is."""
    common: tuple[fx.Node, ...]
    """Nodes, in order, that several paths need."""
    taken: tuple[fx.Node, ...]
    """Those of them that a path takes."""
    own: tuple[tuple[fx.Node, ...], ...]
    """The nodes of each path alone, in order."""
    dim: int
    """The dimension of the concatenation."""


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
    costs = [sum(each.numel() for each in _tensors(layer, nodes)) for nodes in found.own]
    ends = balanced(costs, place.group.num_parts)
    parts = [_part(layer, found, ends[number], ends[number + 1]) for number in place.group.own]
    text = f"{type(layer).__name__} of {len(found.own)} paths"
    made = ByPaths(place, Made(text, parts, {}), _common(layer, found), found.dim)
    made.outline(layer)
    return made.train(layer.training)


def find_paths(layer: nn.Module) -> Paths:
    """Raises: NoPathsError if the module's forward is something else."""
    graph = _trace(layer)
    [output] = [each for each in graph.nodes if each.op == "output"]
    cat = output.args[0]
    if not isinstance(cat, fx.Node) or cat.target not in CONCATENATE:
        raise NoPathsError("its forward does not return a torch.cat of paths")
    tensors = cat.args[0] if cat.args else cat.kwargs.get("tensors")
    dim = cat.args[1] if len(cat.args) > 1 else cat.kwargs.get("dim", 0)
    if not isinstance(tensors, (list, tuple)) or not isinstance(dim, int) or len(tensors) < 2:
        raise NoPathsError("its torch.cat is not one of a list of paths")
    ends = tuple(each for each in tensors if isinstance(each, fx.Node))
    needed = [_needed(each) for each in ends]
    nodes = [each for each in graph.nodes if each not in (cat, output)]
    common = tuple(
        each
        for each in nodes
        if each.op == "placeholder" or sum(each in those for those in needed) > 1
    )
    own = tuple(
        tuple(each for each in nodes if each in those and each not in common) for those in needed
    )
    used = {*ends, *(each for path in own for node in path for each in node.all_input_nodes)}
    taken = tuple(each for each in common if each in used)
    _check(layer, [common, *own])
    return Paths(graph, ends, common, taken, own, dim)


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def _trace(layer: nn.Module) -> fx.Graph:
    """The module's forward, which must be the same in training and in evaluation."""
    training, graphs = layer.training, []
    try:
        for layer.training in (False, True):
            graphs.append(_Tracer().trace(layer))
    except Exception as error:  # whatever its own code raises when it is given no numbers
        said = " ".join(str(error).split())
        raise NoPathsError(f"its forward cannot be traced ({said:.200})") from error
    finally:
        layer.training = training
    if str(graphs[0]) != str(graphs[1]):
        raise NoPathsError("its forward is another one in training")
    return graphs[0]


def _needed(end: fx.Node) -> set[fx.Node]:
    """A node, and all that it is computed from."""
    found, waiting = set(), [end]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _tensors(layer: nn.Module, nodes: Sequence[fx.Node]) -> list[Tensor]:
    """The parameters and buffers of the layers that these nodes call."""
    found: list[Tensor] = []
    for each in nodes:
        if each.op == "call_module":
            module = layer.get_submodule(str(each.target))
            found += [*module.parameters(), *module.buffers()]
        elif each.op == "get_attr":
            module_name, _, name = str(each.target).rpartition(".")
            found.append(getattr(layer.get_submodule(module_name), name))
    return found


def _check(layer: nn.Module, groups: Sequence[Sequence[fx.Node]]) -> None:
    """groups: the nodes that are computed together: what is common, and each path."""
    seen: set[int] = set()
    for nodes in groups:
        tensors = {id(each) for each in _tensors(layer, nodes)}
        if tensors & seen:
            raise NoPathsError("its paths share weights, which one rank is to hold")
        seen |= tensors
    if any(id(each) not in seen for each in (*layer.parameters(), *layer.buffers())):
        raise NoPathsError("it has weights that its forward does not use")
    for name in (each for nodes in groups[1:] for node in nodes for each in _called(layer, node)):
        if any(word in name.lower() for word in DRAWS):
            raise NoPathsError(f"a path draws random numbers ({name}), which all ranks must draw")


def _called(layer: nn.Module, node: fx.Node) -> list[str]:
    """The names of functions, or of kinds of layers, that a node calls."""
    if node.op == "call_module":
        inner = layer.get_submodule(str(node.target)).modules()
        return [type(each).__name__ for each in inner]
    if node.op in ("call_function", "call_method"):
        return [getattr(node.target, "__name__", str(node.target))]
    return []


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
