"""Finds the paths of a module by tracing its own `forward`; its layers are not looked into.

inputs -> what the paths have in common -> path, path, … -> torch.cat
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from firecaffe.parallel.cut import Cut, balanced

PATHS = "paths"

CONCATENATE = (torch.cat, torch.concat, torch.concatenate)

RANDOM_NAMES = ("dropout", "rand", "bernoulli", "rrelu")
"""Parts of the names of functions and layers that draw random numbers."""


class NoPathsError(Exception):
    """A module does not consist of paths; the text says why."""


@dataclass(frozen=True)
class Paths:
    graph: fx.Graph
    ends: tuple[fx.Node, ...]
    """The concatenated values: each path's last node, or a value that it passes on unchanged."""
    common: tuple[fx.Node, ...]
    """Nodes, in order, that several paths need."""
    taken: tuple[fx.Node, ...]
    """The nodes of `common` that a path uses directly."""
    own: tuple[tuple[fx.Node, ...], ...]
    """The nodes of each path alone, in order."""
    dim: int


def find_paths(layer: nn.Module) -> Paths:
    """Trace a module. Raises: NoPathsError if its forward is not a concatenation of paths."""
    graph = _trace(layer)
    [output] = [node for node in graph.nodes if node.op == "output"]
    cat = output.args[0]
    if not isinstance(cat, fx.Node) or cat.target not in CONCATENATE:
        raise NoPathsError("its forward does not return a torch.cat of paths")
    tensors = cat.args[0] if cat.args else cat.kwargs.get("tensors")
    dim = cat.args[1] if len(cat.args) > 1 else cat.kwargs.get("dim", 0)
    if not isinstance(tensors, (list, tuple)) or not isinstance(dim, int) or len(tensors) < 2:
        raise NoPathsError("its torch.cat is not one of a list of paths")
    ends = tuple(tensor for tensor in tensors if isinstance(tensor, fx.Node))
    needed = [_needed(end) for end in ends]
    nodes = [node for node in graph.nodes if node not in (cat, output)]
    common = tuple(
        node
        for node in nodes
        if node.op == "placeholder" or sum(node in those for those in needed) > 1
    )
    paths = tuple(
        tuple(node for node in nodes if node in those and node not in common) for those in needed
    )
    used = {
        *ends,
        *(source for path in paths for node in path for source in node.all_input_nodes),
    }
    taken = tuple(node for node in common if node in used)
    _check(layer, [common, *paths])
    return Paths(graph, ends, common, taken, paths, dim)


class _PathTracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def _trace(layer: nn.Module) -> fx.Graph:
    training, graphs = layer.training, []
    try:
        for layer.training in (False, True):
            graphs.append(_PathTracer().trace(layer))
    except Exception as error:  # a user's code may raise anything when traced
        said = " ".join(str(error).split())
        raise NoPathsError(f"its forward cannot be traced ({said:.200})") from error
    finally:
        layer.training = training
    if str(graphs[0]) != str(graphs[1]):
        raise NoPathsError("its forward is another one in training")
    return graphs[0]


def _needed(end: fx.Node) -> set[fx.Node]:
    needed, waiting = set(), [end]
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += node.all_input_nodes
    return needed


def tensors_of(layer: nn.Module, nodes: Sequence[fx.Node]) -> list[Tensor]:
    tensors: list[Tensor] = []
    for node in nodes:
        if node.op == "call_module":
            module = layer.get_submodule(str(node.target))
            tensors += [*module.parameters(), *module.buffers()]
        elif node.op == "get_attr":
            module_name, _, name = str(node.target).rpartition(".")
            tensors.append(getattr(layer.get_submodule(module_name), name))
    return tensors


def _check(layer: nn.Module, groups: Sequence[Sequence[fx.Node]]) -> None:
    seen: set[int] = set()
    for nodes in groups:
        tensors = {id(tensor) for tensor in tensors_of(layer, nodes)}
        if tensors & seen:
            raise NoPathsError("its paths share weights, which one rank is to hold")
        seen |= tensors
    if any(id(parameter) not in seen for parameter in (*layer.parameters(), *layer.buffers())):
        raise NoPathsError("it has weights that its forward does not use")
    for name in (
        called for nodes in groups[1:] for node in nodes for called in _called(layer, node)
    ):
        if any(word in name.lower() for word in RANDOM_NAMES):
            raise NoPathsError(f"a path draws random numbers ({name}), which all ranks must draw")


def _called(layer: nn.Module, node: fx.Node) -> list[str]:
    if node.op == "call_module":
        inner = layer.get_submodule(str(node.target)).modules()
        return [type(part).__name__ for part in inner]
    if node.op in ("call_function", "call_method"):
        return [getattr(node.target, "__name__", str(node.target))]
    return []


def share_paths(layer: nn.Module, found: Paths, num_parts: int) -> Cut:
    """Assign runs of paths to parts so that the heaviest part has the fewest weights possible."""
    return balanced(path_sizes(layer, found), num_parts)


def path_sizes(layer: nn.Module, found: Paths) -> list[int]:
    of_paths = (tensors_of(layer, nodes) for nodes in found.own)
    return [sum(tensor.numel() for tensor in tensors) for tensors in of_paths]
