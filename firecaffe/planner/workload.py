"""The work of a step: a network's layers, each with its operations and bytes for one image.

An optimizer keeps vectors as long as the weights, and makes more during an update. Both are counted
in updates of one small matrix, because torch's `foreach` forms, and ours, make lists of tensors
that depend on the optimizer, its weight decay and torch's version.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from math import prod
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from firecaffe.data.dataset import Layout, TensorLayout, tree_text
from firecaffe.errors import RecipeError
from firecaffe.exchange.schedule import BYTES_PER_ELEMENT
from firecaffe.gradients.config import NO_COMPRESSOR
from firecaffe.meta_kernels import without_compiler
from firecaffe.models import MODELS, ModelConfig
from firecaffe.models.kernel import ELEMENTWISE, MATRIX, Kernel
from firecaffe.models.layer_costs import LayerProfile, Profile, profile_on, saved_bytes
from firecaffe.models.network import LIBRARIES, maker_of, with_outline
from firecaffe.planner.cluster import PRECISIONS
from firecaffe.planner.epochs_law import PUBLISHED, EpochsLaw
from firecaffe.planner.library_rates import FLOAT32, TF32
from firecaffe.resume_advice import option
from firecaffe.solvers.config import SolverConfig
from firecaffe.solvers.optimizer import make_optimizer
from firecaffe.user_code import failed, is_caffe

T = TypeVar("T")

PROFILED_IMAGES = 2
"""Images of the profiling run; batch normalization has no statistics of a single one."""


@dataclass(frozen=True)
class LayerWork:
    name: str
    flops: float
    """Forward operations of one image that multiply matrices (a multiply-add is two)."""
    moved_bytes: float
    """Activations read and written for one image, as float32."""
    weight_bytes: float
    shapes: tuple[tuple[int, ...], ...] = ()
    backward_share: float = 1.0
    """0.5 if its weights are frozen (only inputs' gradients); 0 if all before it are, too."""
    output_bytes: float = 0.0
    """The output for one image, as float32; a part of `moved_bytes`."""
    kept_bytes: float = 0.0
    """Bytes that autograd keeps of its call for one image, as float32, until its backward."""
    kernels: tuple[Kernel, ...] = ()
    """The kernels it starts, each with its shares of `flops`, `moved_bytes` and `weight_bytes`."""

    @cached_property
    def whole_kernels(self) -> tuple[Kernel, ...]:
        """Its kernels with their work; a single one if they are unknown."""
        if not self.kernels and not self.moved_bytes and not self.flops:
            return ()
        alone = Kernel(MATRIX if self.flops else ELEMENTWISE, 1.0, 1.0, 1.0)
        moved, weights = (
            size / BYTES_PER_ELEMENT for size in (self.moved_bytes, self.weight_bytes)
        )
        return tuple(kernel.part(self.flops, moved, weights) for kernel in self.kernels or (alone,))

    @cached_property
    def parameters_bytes(self) -> tuple[int, ...]:
        return tuple(BYTES_PER_ELEMENT * prod(shape) for shape in self.shapes)


@dataclass(frozen=True)
class Workload:
    model: str
    layers: tuple[LayerWork, ...]
    activation_bytes: float
    """Bytes that autograd keeps of one image for backward, as float32."""
    layout: Layout
    num_classes: int
    """0 if unknown."""
    global_batch_size: int
    micro_batch_size: int
    samples: int = 0
    """Samples of an epoch; 0 if unknown."""
    steps: int = 0
    """Steps of the whole training; 0 if unknown."""
    optimizer_vectors: int = 1
    """Vectors as long as the weights that the optimizer keeps."""
    update_vectors: int = 0
    """Vectors that exist at once in an update, as long as the weights that it updates."""
    autocast: str = "none"
    tf32: bool = False
    """Whether matrices of float32 are multiplied as tf32."""
    channels_last: bool = False
    bucket_bytes: int = 4_000_000
    gradient_bytes: int = BYTES_PER_ELEMENT
    """Bytes of one gradient element on the wire; another library may send 2."""
    stored_bytes: float = 0.0
    """Size of one image in storage; 0 if the data are held in memory."""
    shared_memory: bool = True
    exchange: str = ""
    """The recipe's exchange; empty without a recipe."""
    compressor: str = NO_COMPRESSOR
    any_shares: bool = False
    """Whether workers may get arbitrary shares of a step's micro-batches."""
    compressor_level: int = 0
    update_at: str = "all"
    has_whole_shards: bool = False
    """Whether each parameter has one owner, if workers update shards."""
    frozen_bytes: int = 0
    threads: int = 1
    eval_batch_size: int = 0
    """Samples that a worker evaluates at once; 0 if unknown, or none are evaluated."""
    epochs_law: EpochsLaw | None = None
    """The law that the user gave; see `law`."""
    assumption: str = ""

    @property
    def precision(self) -> str:
        """The dtype in which matrices are multiplied: float32, tf32, float16, bfloat16."""
        if self.autocast != "none":
            return self.autocast
        return TF32 if self.tf32 else FLOAT32

    @property
    def num_micro_batches(self) -> int:
        return self.global_batch_size // self.micro_batch_size

    @property
    def law(self) -> EpochsLaw | None:
        """The user's law, or a published one for this network on ImageNet."""
        is_imagenet = (self.samples, self.num_classes) == (IMAGENET_IMAGES, 1000)
        is_published = is_imagenet and getattr(self.layout.inputs, "shape", None) in CROPS
        return self.epochs_law or (PUBLISHED.get(self.model) if is_published else None)

    @cached_property
    def parameter_bytes(self) -> int:
        return sum(sum(layer.parameters_bytes) for layer in self.layers)

    @cached_property
    def tensors_bytes(self) -> tuple[int, ...]:
        """Sizes of parameters, in the order in which backward makes their gradients ready."""
        backwards = (layer.parameters_bytes[::-1] for layer in reversed(self.layers))
        return tuple(chain.from_iterable(backwards))


def in_precision(work: Workload, word: str, channels_last: bool = False) -> Workload:
    """Return the work in the arithmetic `word` of PRECISIONS; "" keeps the work's own."""
    work = replace(work, channels_last=work.channels_last or channels_last)
    if not word:
        return work
    dtype = PRECISIONS[word]
    half = dtype not in (FLOAT32, TF32)
    return replace(work, autocast=dtype if half else "none", tf32=dtype == TF32)


def precision_text(work: Workload) -> str:
    """The arithmetic, as the first line of a plan states it."""
    words = {
        FLOAT32: "in float32",
        TF32: "in float32 with tf32 matrices",
    }.get(work.precision, f"in {work.precision} by autocast")
    return words + (", channels last" if work.channels_last else "")


@dataclass(frozen=True)
class Layers:
    works: tuple[LayerWork, ...]
    profile: Profile
    activation_bytes: float
    frozen_bytes: int


def layers_of(config: ModelConfig, layout: Layout | None, num_classes: int | None) -> Layers:
    """Find a network's layers on the meta device; without a layout, for its authors' images.

    Raises: RecipeError if it does not exist or does not take such images; OwnCodeError.
    """
    samples = layout or images_of(input_of(config))
    in_channels = None if layout is None else layout.channels
    return with_outline(config, num_classes, in_channels, lambda it: _layers(config, it, samples))


def images_of(shape_CHW: tuple[int, int, int]) -> Layout:
    return Layout(TensorLayout(shape_CHW, torch.float32), TensorLayout((), torch.int64))


def input_of(config: ModelConfig) -> tuple[int, int, int]:
    """The shape of the images that a network was made for. Raises: RecipeError if it is unknown."""
    name = config.name
    maker_of(name)  # raises an error that lists the networks
    if name in MODELS:
        return MODELS[name].input_CHW
    if is_caffe(name):
        return _of_caffe(config)
    if name.partition(":")[0] in LIBRARIES:
        return IMAGENET_CHW
    raise RecipeError(f"{name!r} does not say what it takes; give {option('input')}, as 3x32x32")


def _of_caffe(config: ModelConfig) -> tuple[int, int, int]:
    given = config.args.get("input_CHW", ())
    if len(given) != 3:
        raise RecipeError(
            f"model.args of {config.name} says no input_CHW of three numbers; give it, as "
            f"{{ input_CHW = [3, 227, 227] }}, or {option('input')}, as 3x227x227"
        )
    channels, rows, columns = map(int, given)
    return channels, rows, columns


IMAGENET_CHW = (3, 224, 224)
IMAGENET_IMAGES = 1_281_167
CROPS = (IMAGENET_CHW, (3, 227, 227))
"""Shapes of images of published trainings: 224 in papers, often 227 in the files of Caffe."""


def profile_of(config: ModelConfig, network: nn.Module, layout: Layout, samples: int) -> Profile:
    """Profile a network. Raises: RecipeError or OwnCodeError if it does not take such samples."""
    return on_zeros(config, network, layout, samples, profile_on)


def on_outline(
    config: ModelConfig, layout: Layout, num_classes: int | None, use: Callable[[nn.Module, Any], T]
) -> T:
    """Call `use` with the network and a few zeros, on the meta device. Raises: as `layers_of`."""
    return with_outline(
        config,
        num_classes,
        layout.channels,
        lambda network: on_zeros(config, network, layout, PROFILED_IMAGES, use),
    )


def on_zeros(
    config: ModelConfig,
    network: nn.Module,
    layout: Layout,
    samples: int,
    use: Callable[[nn.Module, Any], T],
) -> T:
    """Call `use` with the network and a batch of zeros, on its device. Raises: as `profile_of`."""
    device = next((parameter.device for parameter in network.parameters()), torch.device("cpu"))
    inputs, _ = layout.zeros(samples, device)
    try:
        return use(network, inputs)
    except Exception as error:
        zeros = f"zeros of {tree_text(layout.inputs)}, which stand for samples"
        said = f"{config.name} does not take {zeros}"
        if config.name not in MODELS:
            raise failed(f"{said}: it", error) from error
        raise RecipeError(f"{said}: {str(error).splitlines()[0]}") from error


def _layers(config: ModelConfig, network: nn.Module, layout: Layout) -> Layers:
    profiled = profile_of(config, network, layout, PROFILED_IMAGES)
    saved = on_zeros(config, network, layout, PROFILED_IMAGES, saved_bytes)
    trained: dict[str, list[tuple[int, ...]]] = {}
    frozen: dict[str, int] = {}
    for name, parameter in network.named_parameters():
        layer = name.rpartition(".")[0]
        if parameter.requires_grad:
            trained.setdefault(layer, []).append(tuple(parameter.shape))
        else:
            frozen[layer] = frozen.get(layer, 0) + parameter.nbytes
    works: list[LayerWork] = []
    is_after_trained = not frozen
    for row in profiled.layers:
        shapes = tuple(trained.pop(row.name, ()))
        is_after_trained = is_after_trained or bool(shapes)
        is_frozen = not shapes and row.name.partition("#")[0] in frozen
        share = float(is_after_trained) * (0.5 if is_frozen else 1.0)
        kept_bytes = saved.pop(row.name, 0) / PROFILED_IMAGES
        works.append(replace(_work_of(row, shapes, share), kept_bytes=kept_bytes))
    if works:  # kept before the first call, or by a call without a row
        kept_bytes = works[0].kept_bytes + sum(saved.values()) / PROFILED_IMAGES
        works[0] = replace(works[0], kept_bytes=kept_bytes)
    # Parameters that forward does not use are exchanged, too.
    works += [LayerWork(name, 0.0, 0.0, 0.0, tuple(rest)) for name, rest in trained.items()]
    kept_bytes = sum(work.kept_bytes for work in works)
    return Layers(tuple(works), profiled, kept_bytes, sum(frozen.values()))


def _work_of(row: LayerProfile, shapes: tuple[tuple[int, ...], ...], share: float) -> LayerWork:
    moved_bytes = (row.input_activation_bytes + row.output_activation_bytes) / PROFILED_IMAGES
    flops = sum(kernel.flops for kernel in row.kernels)
    kernels = tuple(
        kernel.part(
            1 / flops if flops else 0.0,
            BYTES_PER_ELEMENT / moved_bytes if moved_bytes else 0.0,
            BYTES_PER_ELEMENT / row.weight_bytes if row.weight_bytes else 0.0,
        )
        for kernel in row.kernels
    )
    return LayerWork(
        name=row.name,
        flops=flops,
        moved_bytes=moved_bytes,
        weight_bytes=row.weight_bytes,
        shapes=shapes,
        backward_share=share,
        output_bytes=row.output_activation_bytes / PROFILED_IMAGES,
        kernels=kernels,
    )


SHAPE = (8, 8)
"""A matrix, because some optimizers take no vector."""


class Vectors(NamedTuple):
    kept: int
    made: int
    """The most that exist at once in an update, and are freed by its end."""


def vectors_of(solver: SolverConfig) -> Vectors:
    """Count a solver's vectors. Raises: as `make_optimizer`; OwnCodeError if its step fails."""
    parameter, alike = nn.Parameter(torch.ones(SHAPE)), replace(solver, lr_mult={}, decay_mult={})
    with without_compiler():  # an optimizer would load it
        optimizer = make_optimizer({"weight": parameter}, alike)
        parameter.grad = torch.ones(SHAPE)
        try:
            optimizer.step()  # the first step makes the vectors that are kept
            with torch.no_grad(), _CountMatrices() as made:
                optimizer.step()
        except Exception as error:  # a user's may take no matrix, and still fit the network
            raise failed(f"solver.type {solver.type!r}: a step of a matrix", error) from error
    state = optimizer.state[parameter].values()
    kept = sum(1 for value in state if isinstance(value, Tensor) and value.shape == SHAPE)
    return Vectors(kept, made.most)


class _CountMatrices(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = self._now = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = {matrix.untyped_storage().data_ptr() for matrix in _matrices((args, kwargs))}
        made = func(*args, **(kwargs or {}))
        for matrix in _matrices(made):
            if matrix.untyped_storage().data_ptr() not in given:  # not in place, not a view
                self._now += 1
                weakref.finalize(matrix, self._gone)
        self.most = max(self.most, self._now)
        return made

    def _gone(self) -> None:
        self._now -= 1


def _matrices(value: Any) -> list[Tensor]:
    leaves = tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.shape == SHAPE]
