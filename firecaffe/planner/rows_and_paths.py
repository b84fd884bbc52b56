"""Volumes of splits that cut no layer's weights: by rows of images, and by paths of a module."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor, fx, nn

from firecaffe.parallel.find_paths import NoPathsError, Paths, find_paths, share_paths
from firecaffe.parallel.slide import Slide, crossing_rows, slide_of
from firecaffe.parallel.volumes import (
    Sizes,
    by_paths,
    by_rows,
    data_numbers,
    gather_numbers,
    norm_by_rows,
)


@dataclass(frozen=True)
class Rows:
    slide: Slide | None
    """The way a convolution moves over rows; None for a batch normalization."""
    rows: int
    channels: int
    columns: int

    def numbers(self, sizes: Sizes, samples: int, workers: int) -> float | None:
        """Numbers that each worker sends if input and output are whole; None for too few rows."""
        made = self.rows if self.slide is None else self.slide.outputs(self.rows)
        if min(self.rows, made) < workers:
            return None
        has_gradient = sizes.input_has_gradient
        outputs = gather_numbers(workers, samples * sizes.outputs, made)
        inputs = has_gradient * gather_numbers(workers, samples * sizes.inputs, self.rows)
        if self.slide is None:
            sums = norm_by_rows(workers, sizes.weights, self.channels, has_gradient)
            return sums + outputs + inputs
        crossing = crossing_rows(self.slide, self.rows, workers) if workers > 1 else 0
        halo = samples * crossing * self.channels * self.columns / max(1, workers - 1)
        both_ways = halo if has_gradient else halo / 2
        return by_rows(workers, sizes.weights, both_ways) + outputs + inputs


def rows_of(layer: nn.Module, shape: tuple[int, ...]) -> Rows | None:
    """The rows of a layer with this input shape; None if it cannot be split by rows."""
    if type(layer) not in (nn.Conv2d, nn.BatchNorm2d) or len(shape) != 4:
        return None
    slide = None
    if isinstance(layer, nn.Conv2d):
        if layer.padding_mode != "zeros":
            return None
        slide = slide_of(layer)
    return Rows(slide, shape[2], shape[1], shape[3])


@dataclass(frozen=True)
class PathsVolumes:
    """The volumes of a module of paths, in numbers that each worker sends in a step."""

    name: str
    kind: str
    paths: int
    weights: int
    """The number of trained parameters, including those of layers that paths share."""
    inputs: int
    outputs: int
    by_data: float
    by_paths: float | None
    """Numbers sent if it is split by paths; None if there are fewer paths than workers."""

    @property
    def cheapest(self) -> str:
        is_less = self.by_paths is not None and self.by_paths < self.by_data
        return "paths" if is_less else "data"


@dataclass(frozen=True)
class PathModule:
    name: str
    layer: nn.Module
    paths: Paths
    sizes: Mapping[fx.Node, int]
    """Numbers that each node makes, of one sample."""
    has_gradient: bool
    """Whether the inputs of the paths need a gradient."""

    def volumes(self, samples: int, workers: int) -> PathsVolumes:
        """Compute the volumes. samples: the size of a micro-batch, which all workers compute."""
        weights = sum(
            parameter.numel() for parameter in self.layer.parameters() if parameter.requires_grad
        )
        inputs = sum(self.sizes.get(node, 0) for node in self.paths.taken)
        ends = [self.sizes[end] for end in self.paths.ends]
        numbers = None
        if len(ends) >= workers:
            runs = pairwise(share_paths(self.layer, self.paths, workers))
            largest = max(sum(ends[start:stop]) for start, stop in runs)
            numbers = by_paths(workers, samples * inputs * self.has_gradient, samples * largest)
        whole = Sizes(weights, inputs, sum(ends), 1, 1, self.has_gradient)
        return PathsVolumes(
            self.name,
            type(self.layer).__name__,
            len(ends),
            weights,
            inputs,
            sum(ends),
            data_numbers(whole, workers),
            numbers,
        )


def named_paths(network: nn.Module, names: Collection[str]) -> dict[str, tuple[nn.Module, Paths]]:
    named = dict(network.named_modules())
    return {name: (named[name], find_paths(named[name])) for name in names}


def path_modules(network: nn.Module) -> dict[str, tuple[nn.Module, Paths]]:
    """Find modules of paths that contain layers; of nested modules only the outermost."""
    modules: dict[str, tuple[nn.Module, Paths]] = {}
    for name, layer in network.named_modules():
        if not name or not any(True for _ in layer.children()):
            continue
        if any(name.startswith(f"{outer}.") for outer in modules):
            continue
        try:
            modules[name] = layer, find_paths(layer)
        except NoPathsError:
            continue
    return modules


class _Sizes(fx.Interpreter):
    def __init__(self, layer: nn.Module, graph: fx.Graph) -> None:
        super().__init__(layer, graph=graph)
        self.numbers: dict[fx.Node, int] = {}
        self.wanted: set[fx.Node] = set()

    def run_node(self, n: fx.Node) -> Any:
        made = super().run_node(n)
        if isinstance(made, Tensor):
            self.numbers[n] = made.numel()
            if made.requires_grad:
                self.wanted.add(n)
        return made


def sized(name: str, layer: nn.Module, found: Paths, inputs: tuple[Any, ...]) -> PathModule:
    run = _Sizes(layer, found.graph)
    run.run(*inputs)
    samples = len(inputs[0])
    sizes = {node: numbers // samples for node, numbers in run.numbers.items()}
    return PathModule(name, layer, found, sizes, any(n in run.wanted for n in found.taken))
