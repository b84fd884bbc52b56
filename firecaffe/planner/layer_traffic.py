"""Compares what each layer would send by data parallelism and by each split.

Splits by rows of images, and by paths of a module, cut no layer's weights.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from math import inf
from typing import Any

from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from firecaffe.data.dataset import Layout
from firecaffe.errors import RecipeError
from firecaffe.exchange.schedule import BYTES_PER_ELEMENT
from firecaffe.meta_kernels import without_compiler
from firecaffe.models import ModelConfig
from firecaffe.parallel.cut import Slide, crossing_rows, slide_of
from firecaffe.parallel.find_paths import NoPathsError, Paths, find_paths, share_paths
from firecaffe.parallel.volumes import (
    Sizes,
    by_both,
    by_inputs,
    by_outputs,
    by_paths,
    by_rows,
    data_numbers,
    gather_numbers,
    most_samples,
    norm_by_rows,
)
from firecaffe.planner.workload import on_outline

BY_DATA = "data"

Volume = Callable[[Sizes, int], float]

WORDS: dict[type[nn.Module], dict[str, Volume]] = {
    nn.Linear: {"neurons": by_outputs, "inputs": by_inputs},
    nn.Conv2d: {"filters": by_outputs, "channels": by_inputs},
    nn.BatchNorm1d: {"neurons": by_both},
    nn.BatchNorm2d: {"filters": by_both},
}
"""The words for a split and their volumes; a test compares them with `parallel.split_kinds`."""


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
class LayerVolumes:
    """The volumes of a layer with weights, in numbers that each worker sends in a step."""

    name: str
    kind: str
    weights: int
    weight_bytes: int
    inputs: int
    """Input numbers of one sample, in all calls of the layer."""
    outputs: int
    by_data: float
    by_model: dict[str, float]
    """Volumes by the word of the split; empty if this many workers cannot split the layer."""
    by_rows: float | None
    """Volume by rows of images, which share out no weights; None if that is not possible."""
    most_samples: int | None
    """The batch size up to which the better split sends less than data parallelism."""
    cheapest: str

    @property
    def least_by_model(self) -> float:
        return min(self.by_model.values(), default=self.by_data)


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
class Volumes:
    """A network's volumes; totals are float32 bytes that each worker sends in a step."""

    workers: int
    batch_size: int
    layers: tuple[LayerVolumes, ...]
    paths: tuple[PathsVolumes, ...] = ()
    """Modules of paths, whose layers are also in `layers`."""

    @property
    def bytes_by_data(self) -> float:
        return BYTES_PER_ELEMENT * sum(layer.by_data for layer in self.layers)

    @property
    def bytes_by_model(self) -> float:
        return BYTES_PER_ELEMENT * sum(layer.least_by_model for layer in self.layers)

    @property
    def bytes_by_layer(self) -> float:
        ways = (min(layer.by_data, layer.least_by_model) for layer in self.layers)
        return BYTES_PER_ELEMENT * sum(ways)

    def as_dict(self) -> dict[str, Any]:
        totals = ("bytes_by_data", "bytes_by_model", "bytes_by_layer")
        return asdict(self) | {name: getattr(self, name) for name in totals}


def volumes_of(config: ModelConfig, layout: Layout, batch_size: int, workers: int) -> Volumes:
    """Compute the volumes of a network's layers, on the meta device.

    Raises: RecipeError if it has no trained weights or does not take such samples; OwnCodeError.
    """

    def find(network: nn.Module, inputs: Any) -> tuple[list[Layer], list[PathsVolumes]]:
        layers = layers_on(network, inputs)
        return layers, [module.volumes(batch_size, workers) for module in paths_on(network, inputs)]

    layers, paths = on_outline(config, layout, None, find)
    if not layers:
        raise RecipeError(
            f"{config.name} has no weights that are trained, so nothing is to be sent for them"
        )
    rows = (_volumes(layer, batch_size, workers) for layer in layers)
    return Volumes(workers, batch_size, tuple(rows), tuple(paths))


@dataclass(frozen=True)
class Layer:
    name: str
    kind: str
    sizes: Sizes
    words: dict[str, Volume]
    """The words by which it can be split, if it has enough elements."""
    images: Rows | None = None


def layers_on(network: nn.Module, inputs: Any) -> list[Layer]:
    """List layers with trained weights, by one run in training mode. inputs: see `profile_on`."""
    samples = len(tree_leaves(inputs)[0])
    calls = _calls(network, inputs)
    times = Counter(
        id(parameter) for _, parameter in network.named_parameters(remove_duplicate=False)
    )
    layers: list[Layer] = []
    seen: set[int] = set()
    for name, part in network.named_modules():
        trained = [
            parameter for parameter in part.parameters(recurse=False) if parameter.requires_grad
        ]
        new = [parameter for parameter in trained if id(parameter) not in seen]
        seen.update(map(id, new))
        if not trained:
            continue
        call = calls[part]
        volumes = WORDS.get(type(part), {})
        is_shared = any(times[id(parameter)] > 1 for parameter in trained)
        if not call.outputs or is_shared:
            volumes = {}  # the layer is not called, or `split` refuses it
        elements = _elements(part) if volumes else (1, 1)
        if isinstance(part, nn.Conv2d) and part.groups > 1:
            volumes, elements = dict.fromkeys(volumes, by_both), (part.groups, part.groups)
        sizes = Sizes(
            sum(parameter.numel() for parameter in new),
            call.inputs // samples,
            call.outputs // samples,
            *elements,
            call.input_has_gradient,
        )
        images = None if call.times != 1 or is_shared else rows_of(part, call.shape)
        layers.append(Layer(name, type(part).__name__, sizes, volumes, images))
    return layers


@dataclass
class _Calls:
    inputs: int = 0
    outputs: int = 0
    input_has_gradient: bool = False
    times: int = 0
    shape: tuple[int, ...] = ()


def _calls(network: nn.Module, inputs: Any) -> dict[nn.Module, _Calls]:
    by_module = {part: _Calls() for part in network.modules()}

    def count(part: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        calls, taken = by_module[part], _tensors((args, kwargs))
        calls.inputs += sum(tensor.numel() for tensor in taken)
        calls.outputs += sum(tensor.numel() for tensor in _tensors(output))
        calls.input_has_gradient |= any(tensor.requires_grad for tensor in taken)
        calls.times += 1
        calls.shape = tuple(taken[0].shape) if taken else ()

    with ExitStack() as hooks, without_compiler():
        for part in by_module:
            hooks.enter_context(part.register_forward_hook(count, with_kwargs=True))
        network.train()(inputs)
    return by_module


def _volumes(layer: Layer, batch_size: int, workers: int) -> LayerVolumes:
    sizes = layer.sizes
    by_data = data_numbers(sizes, workers)
    a_sample = {}
    for word, volume in layer.words.items():
        cut = sizes.input_elements if volume is by_inputs else sizes.output_elements
        if cut >= workers:
            a_sample[word] = volume(sizes, workers)
    by_model = {word: batch_size * numbers for word, numbers in a_sample.items()}
    least = min(a_sample.values(), default=0.0)
    best = min(by_model, key=by_model.__getitem__, default=BY_DATA)
    return LayerVolumes(
        name=layer.name,
        kind=layer.kind,
        weights=sizes.weights,
        weight_bytes=BYTES_PER_ELEMENT * sizes.weights,
        inputs=sizes.inputs,
        outputs=sizes.outputs,
        by_data=by_data,
        by_model=by_model,
        by_rows=None if layer.images is None else layer.images.numbers(sizes, batch_size, workers),
        most_samples=most_samples(by_data, least) if least else None,
        cheapest=best if by_model.get(best, inf) < by_data else BY_DATA,
    )


def _elements(part: Any) -> tuple[int, int]:
    if isinstance(part, nn.Linear):
        return part.in_features, part.out_features
    if isinstance(part, nn.Conv2d):
        return part.in_channels, part.out_channels
    return part.num_features, part.num_features


def _tensors(value: Any) -> Sequence[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


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


def paths_on(
    network: nn.Module, inputs: Any, names: Collection[str] | None = None
) -> list[PathModule]:
    """Find the modules of paths that are called, all or by name, by one run in training mode."""
    parts = dict(network.named_modules())
    paths = _outermost(parts) if names is None else {n: find_paths(parts[n]) for n in names}
    given: dict[str, tuple[Any, ...]] = {}

    def note(name: str, _: nn.Module, taken: tuple[Any, ...]) -> None:
        given.setdefault(name, taken)

    with ExitStack() as hooks, without_compiler():
        for name in paths:
            hooks.enter_context(parts[name].register_forward_pre_hook(partial(note, name)))
        if paths:
            network.train()(inputs)
        return [
            _sized(name, parts[name], paths[name], given[name]) for name in paths if name in given
        ]


def _outermost(parts: Mapping[str, nn.Module]) -> dict[str, Paths]:
    """Find the modules of paths that contain layers; of nested modules only the outermost."""
    paths: dict[str, Paths] = {}
    for name, part in parts.items():
        is_inside = any(name.startswith(f"{outer}.") for outer in paths)
        if name and not is_inside and any(True for _ in part.children()):
            with suppress(NoPathsError):
                paths[name] = find_paths(part)
    return paths


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


def _sized(name: str, layer: nn.Module, paths: Paths, inputs: tuple[Any, ...]) -> PathModule:
    run = _Sizes(layer, paths.graph)
    run.run(*inputs)
    samples = len(inputs[0])
    sizes = {node: numbers // samples for node, numbers in run.numbers.items()}
    return PathModule(name, layer, paths, sizes, any(n in run.wanted for n in paths.taken))
