"""Compares what each layer would send by data parallelism and by each split."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from math import inf
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from firecaffe.data.dataset import Layout
from firecaffe.errors import RecipeError
from firecaffe.exchange.choose import BYTES_PER_ELEMENT
from firecaffe.meta_kernels import without_compiler
from firecaffe.models.config import ModelConfig
from firecaffe.parallel.find_paths import Paths
from firecaffe.parallel.volumes import (
    Sizes,
    by_both,
    by_inputs,
    by_outputs,
    data_numbers,
    most_samples,
)
from firecaffe.planner.rows_and_paths import (
    PathModule,
    PathsVolumes,
    Rows,
    named_paths,
    path_modules,
    rows_of,
    sized,
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
        if not call.outputs or any(times[id(parameter)] > 1 for parameter in trained):
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
        is_shared = any(times[id(parameter)] > 1 for parameter in trained)
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


def paths_on(network: nn.Module, inputs: Any) -> list[PathModule]:
    """Find the modules of paths that are called; runs the network once in training mode."""
    return _called_paths(network, inputs, path_modules(network))


def paths_of(network: nn.Module, inputs: Any, names: Collection[str]) -> list[PathModule]:
    """Find the modules of paths with these names; runs the network once in training mode."""
    return _called_paths(network, inputs, named_paths(network, names)) if names else []


def _called_paths(
    network: nn.Module, inputs: Any, modules: Mapping[str, tuple[nn.Module, Paths]]
) -> list[PathModule]:
    given: dict[nn.Module, tuple[Any, ...]] = {}

    def note(part: nn.Module, taken: tuple[Any, ...]) -> None:
        given.setdefault(part, taken)

    with ExitStack() as hooks, without_compiler():
        for layer, _ in modules.values():
            hooks.enter_context(layer.register_forward_pre_hook(note))
        network.train()(inputs)
        return [
            sized(name, layer, paths, given[layer])
            for name, (layer, paths) in modules.items()
            if layer in given
        ]


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
