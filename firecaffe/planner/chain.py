"""Describes a network as a chain of units, which are layers that may be split.

Layers are in the order in which they are called. Branches (an inception module's, a residual
block's) are treated as one sequence, in which each layer keeps its real input size. So the costs of
layers in one layout are right, but not the cost of a change of layout within a branched module.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Set
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

from torch import Tensor, fx, nn

from firecaffe.caffe.local_response_norm import LocalResponseNorm
from firecaffe.exchange.schedule import BYTES_PER_ELEMENT
from firecaffe.models import ModelConfig
from firecaffe.parallel.cut import (
    Slide,
    check_num_rows,
    crossing_between,
    cut,
    part_windows,
    pool_slide,
)
from firecaffe.parallel.find_paths import PATHS, path_sizes
from firecaffe.parallel.volumes import by_both
from firecaffe.planner.layer_traffic import Layer, PathModule, layers_on, paths_on, rows_of
from firecaffe.planner.workload import LayerWork, Workload, on_outline

BY_ELEMENT = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus),
    *(nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Sigmoid, nn.Tanh, nn.Identity, nn.Dropout),
)
"""Element-wise modules, as in `parallel.tensor`."""

NORMS = (nn.LocalResponseNorm, LocalResponseNorm)
"""Modules that also see neighboring channels."""


@dataclass(frozen=True)
class ImageRows:
    slide: Slide | None
    """The way a convolution or a pool moves over rows; None if it works on each row by itself."""
    rows: int
    row: int
    """Numbers in one row of one sample."""
    summed: int = 0
    """Channels of a batch normalization, whose statistics are summed over all rows."""
    is_layer: bool = False
    """Whether a recipe can split it by rows."""

    @property
    def outputs(self) -> int:
        return self.rows if self.slide is None else self.slide.outputs(self.rows)

    def can_be_cut(self, parts: int) -> bool:
        return self.outputs >= parts

    def check(self, name: str, parts: int) -> None:
        check_num_rows(name, self.rows, self.outputs, parts)

    def given(self, parts: int, workers: int) -> float:
        """The largest worker's share of the input's rows."""
        return _largest(self.rows, parts, workers)

    def made(self, parts: int, workers: int) -> float:
        return _largest(self.outputs, parts, workers)

    def seen(self, parts: int, workers: int) -> float:
        """Rows that the busiest worker's parts read, with repeats, over all rows; 0 if no slide."""
        if self.slide is None:
            return 0.0
        windows, per_worker = part_windows(self.slide, self.rows, parts), parts // workers
        of_workers = (windows[start : start + per_worker] for start in range(0, parts, per_worker))
        return max(sum(map(len, worker_windows)) for worker_windows in of_workers) / self.rows

    def crossing(self, parts: int, workers: int) -> list[list[int]]:
        if self.slide is None:
            return [[0] * workers for _ in range(workers)]
        return crossing_between(self.slide, self.rows, parts, workers)


def _largest(rows: int, parts: int, workers: int) -> float:
    ends = cut(rows, parts)[:: parts // workers]
    return max(stop - start for start, stop in pairwise(ends)) / rows


def _slide_of_pool(part: Any) -> Slide | None:
    if type(part) is nn.MaxPool2d and not part.return_indices:
        settings = part.kernel_size, part.stride, part.padding, part.dilation, part.ceil_mode
        return pool_slide(*settings)
    if type(part) is nn.AvgPool2d:
        return pool_slide(part.kernel_size, part.stride, part.padding, 1, part.ceil_mode)
    return None


def images_in(network: nn.Module, run: Callable[[], object]) -> Mapping[str, ImageRows]:
    """Find the images that modules get in a run, by name; omit modules that need whole images."""
    images: dict[str, ImageRows] = {}

    def note(name: str, part: nn.Module, taken: tuple[Any, ...]) -> None:
        if not taken or not isinstance(taken[0], Tensor) or taken[0].ndim != 4:
            return
        shape = tuple(taken[0].shape)
        rows, row = shape[2], shape[1] * shape[3]
        if (layer := rows_of(part, shape)) is not None:
            summed = shape[1] if layer.slide is None else 0
            images[name] = ImageRows(layer.slide, rows, row, summed, is_layer=True)
        elif (slide := _slide_of_pool(part)) is not None or type(part) in (*BY_ELEMENT, *NORMS):
            images[name] = ImageRows(slide, rows, row)

    with ExitStack() as hooks:
        for name, part in network.named_modules():
            hooks.enter_context(part.register_forward_pre_hook(partial(note, name)))
        run()
    return images


CHANNEL_WISE = (
    *BY_ELEMENT,
    *(nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveMaxPool2d, nn.AdaptiveAvgPool2d, nn.Flatten),
)
"""Modules that work on each element or each channel by itself, as in `parallel.tensor`."""

WHOLE = "whole"
"""The name of the chain's end, the loss, which needs whole samples."""


@dataclass(frozen=True)
class PathWork:
    common: tuple[LayerWork, ...]
    """Layers that several paths need, which every worker computes."""
    works: tuple[tuple[LayerWork, ...], ...]
    sizes: tuple[int, ...]
    """The size of each path's tensors, by which paths are balanced over workers."""
    outputs: tuple[int, ...]
    taken: int


@dataclass(frozen=True)
class Unit:
    """A layer and the modules after it that work on its parts; numbers are per sample."""

    name: str
    works: tuple[LayerWork, ...]
    """The layer is first, except that the first unit begins with the modules before its layer."""
    inputs: float
    outputs: float
    output_elements: int = 1
    """Neurons or filters between which outputs can be cut; 1 if they cannot be cut."""
    input_elements: int = 1
    group_elements: int = 1
    """Groups, or a BatchNorm's channels, whose outputs depend only on their own inputs."""
    words: tuple[str, str] = ("", "")
    """A recipe's words for a split: by outputs or groups, and by inputs."""
    is_dense: bool = False
    has_input_gradient: bool = True
    halo: int = 0
    """Neighboring channels that each channel of a local response normalization sees."""
    draws: bool = False
    """Whether the unit contains dropout."""
    images: tuple[ImageRows | None, ...] = ()
    """The images of each work; None if they cannot be cut into rows."""
    paths: PathWork | None = None

    @property
    def weights(self) -> int:
        return sum(sum(work.parameters_bytes) for work in self.works) // BYTES_PER_ELEMENT


def chain_of(config: ModelConfig, work: Workload, paths: Collection[str] = ()) -> tuple[Unit, ...]:
    """Build the chain of a workload's network, which ends with the loss, on the meta device.

    paths: modules that are split by paths. Raises: as `planner.workload.layers_of`.
    """
    find = partial(_modules, paths=paths)
    return units_of(work.layers, on_outline(config, work.layout, work.num_classes or None, find))


@dataclass(frozen=True)
class Modules:
    layers: Mapping[str, Layer] = field(default_factory=dict)
    passing: Set[str] = frozenset()
    dropout: Set[str] = frozenset()
    halos: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Channels of local response normalizations, and the other channels that each one sees."""
    images: Mapping[str, ImageRows] = field(default_factory=dict)
    paths: Mapping[str, PathModule] = field(default_factory=dict)


def _modules(network: nn.Module, inputs: Any, paths: Collection[str]) -> Modules:
    named = dict(network.named_modules())
    channels: dict[Any, int] = {}

    def note(part: nn.Module, taken: tuple[Any, ...]) -> None:
        channels[part] = taken[0].shape[1]

    norms: dict[str, Any] = {name: part for name, part in named.items() if type(part) in NORMS}
    layers: dict[str, Layer] = {}

    def run() -> None:
        layers.update((layer.name, layer) for layer in layers_on(network, inputs))

    with ExitStack() as hooks:
        for norm in norms.values():
            hooks.enter_context(norm.register_forward_pre_hook(note))
        images = images_in(network, run)
    return Modules(
        layers,
        {name for name, part in named.items() if type(part) in CHANNEL_WISE},
        {name for name, part in named.items() if type(part) is nn.Dropout},
        {name: (channels[norm], norm.size - 1) for name, norm in norms.items() if norm in channels},
        images,
        {module.name: module for module in paths_on(network, inputs, paths)},
    )


def units_of(works: tuple[LayerWork, ...], modules: Modules) -> tuple[Unit, ...]:
    calls = Counter(work.name.partition("#")[0] for work in works)
    units: list[Unit] = []
    first: list[LayerWork] = []
    for work in works:
        name = work.name.partition("#")[0]
        # A layer that is called twice stays whole: its calls are at two places of the chain.
        is_once = calls[name] == 1
        images = modules.images.get(name) if is_once else None
        if (module := _module_of(name, modules.paths)) is not None:
            if not units or units[-1].name != module.name:
                units.append(_paths_unit(module, works))
            continue
        if name in modules.passing:
            if units:
                draws = units[-1].draws or name in modules.dropout
                units[-1] = replace(
                    units[-1],
                    works=(*units[-1].works, work),
                    draws=draws,
                    images=(*units[-1].images, images),
                )
            else:
                first.append(work)
            continue
        layer = modules.layers.get(name) if is_once else None
        unit = _unit(work, layer, tuple(first))
        unit = replace(unit, images=(*[None] * len(first), images))
        if is_once and name in modules.halos:
            group_elements, halo = modules.halos[name]
            unit = replace(unit, group_elements=group_elements, words=("channels", ""), halo=halo)
        units.append(unit)
        first = []
    last = units[-1].works[-1].output_bytes / BYTES_PER_ELEMENT
    return (*units, Unit(WHOLE, (), last, last))


def _module_of(name: str, paths: Mapping[str, PathModule]) -> PathModule | None:
    return next((path for path in paths.values() if name.startswith(f"{path.name}.")), None)


def _paths_unit(module: PathModule, works: tuple[LayerWork, ...]) -> Unit:
    def called(nodes: Collection[fx.Node]) -> tuple[LayerWork, ...]:
        names = {f"{module.name}.{node.target}" for node in nodes if node.op == "call_module"}
        named_works = ((work, work.name.partition("#")[0]) for work in works)
        return tuple(
            work for work, name in named_works if any(f"{name}.".startswith(f"{n}.") for n in names)
        )

    traced, sizes = module.paths, module.sizes
    paths = PathWork(
        called(traced.common),
        tuple(called(nodes) for nodes in traced.own),
        tuple(path_sizes(module.layer, traced)),
        tuple(sizes[end] for end in traced.ends),
        sum(sizes.get(node, 0) for node in traced.taken),
    )
    given = sum(numbers for node, numbers in sizes.items() if node.op == "placeholder")
    return Unit(
        module.name,
        (*paths.common, *(work for path in paths.works for work in path)),
        given,
        sum(paths.outputs),
        words=(PATHS, ""),
        has_input_gradient=module.has_gradient,
        paths=paths,
    )


def _unit(work: LayerWork, layer: Layer | None, before: tuple[LayerWork, ...]) -> Unit:
    inputs = (work.moved_bytes - work.output_bytes) / BYTES_PER_ELEMENT
    outputs = work.output_bytes / BYTES_PER_ELEMENT
    works = (*before, work)
    if layer is None or not layer.words:
        has_gradient = layer is None or layer.sizes.input_has_gradient
        return Unit(work.name, works, inputs, outputs, has_input_gradient=has_gradient)
    splits, sizes = [*layer.words], layer.sizes
    has_groups = by_both in layer.words.values()
    return Unit(
        work.name,
        works,
        inputs,
        outputs,
        1 if has_groups else sizes.output_elements,
        1 if has_groups else sizes.input_elements,
        sizes.output_elements if has_groups else 1,
        (splits[0], splits[-1]),
        layer.kind == nn.Linear.__name__,
        sizes.input_has_gradient,
    )
