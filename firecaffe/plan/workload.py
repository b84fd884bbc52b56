"""What a step computes: a network's layers, each with its work and its bytes, for one image."""

from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import prod

import torch

from firecaffe.errors import RecipeError
from firecaffe.exchange.choose import BYTES_PER_ELEMENT
from firecaffe.models import MODELS, build_model
from firecaffe.models.profile import Profile, profile

PROFILED_IMAGES = 2
"""Images that the volumes are found with: batch normalization has no statistics of one."""


@dataclass(frozen=True)
class LayerWork:
    """One call of one layer."""

    name: str
    flops: float
    """Operations of the forward of one image, multiply and add counted as two; 0 but for
    convolutions and fully connected layers.
    """
    moved_bytes: float
    """What it reads and writes of activations for one image, as float32."""
    weight_bytes: float
    shapes: tuple[tuple[int, ...], ...] = ()
    """Shapes of its parameters."""

    @cached_property
    def parameters_bytes(self) -> tuple[int, ...]:
        return tuple(BYTES_PER_ELEMENT * prod(shape) for shape in self.shapes)


@dataclass(frozen=True)
class Workload:
    """A training step, before it is said how many workers share it."""

    model: str
    layers: tuple[LayerWork, ...]
    activation_bytes: float
    """What backward needs kept of one image, as float32."""
    input_CHW: tuple[int, int, int]
    num_classes: int
    global_batch_size: int
    micro_batch_size: int
    samples: int = 0
    """Samples of an epoch; 0 if that is not known."""
    steps: int = 0
    """Steps of the whole training; 0 if that is not known."""
    optimizer_vectors: int = 1
    """Vectors as long as the weights that the optimizer keeps."""
    autocast: str = "none"
    bucket_bytes: int = 4_000_000
    stored_bytes: float = 0.0
    """Size of one image in storage; 0 if the data are held in memory."""
    shared_memory: bool = True
    """Whether ranks of one host may add in memory."""
    compressor_level: int = 0
    assumption: str = ""
    """What was taken for granted, for people; empty if nothing was."""

    @property
    def num_micro_batches(self) -> int:
        return self.global_batch_size // self.micro_batch_size

    @cached_property
    def parameter_bytes(self) -> int:
        return sum(sum(layer.parameters_bytes) for layer in self.layers)

    @cached_property
    def tensors_bytes(self) -> tuple[int, ...]:
        """Sizes of the parameters, in the order in which backward makes their gradients ready."""
        backwards = (layer.parameters_bytes[::-1] for layer in reversed(self.layers))
        return tuple(chain.from_iterable(backwards))


def layers_of(
    model: str, input_CHW: tuple[int, int, int] | None, num_classes: int | None
) -> tuple[tuple[LayerWork, ...], Profile]:
    """A network's layers, found on the meta device.

    Raises: RecipeError if there is no such network, or it does not take such images.
    """
    shape = input_CHW
    with torch.device("meta"):
        network = build_model(model, num_classes, None if shape is None else shape[0])
    shape = shape or MODELS[model].input_CHW
    try:
        found = profile(network, shape, PROFILED_IMAGES)
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        by = "x".join(map(str, shape))
        raise RecipeError(f"{model} does not take an input of {by}: {reason}") from error
    shapes: dict[str, list[tuple[int, ...]]] = {}
    for name, parameter in network.named_parameters():
        shapes.setdefault(name.rpartition(".")[0], []).append(tuple(parameter.shape))
    layers = [
        LayerWork(
            name=row.name,
            flops=2.0 * row.macs / PROFILED_IMAGES,
            moved_bytes=(row.input_activation_bytes + row.output_activation_bytes)
            / PROFILED_IMAGES,
            weight_bytes=row.weight_bytes,
            shapes=tuple(shapes.pop(row.name, ())),
        )
        for row in found.layers
    ]
    # What the forward does not call is exchanged all the same.
    layers += [LayerWork(name, 0.0, 0.0, 0.0, tuple(rest)) for name, rest in shapes.items()]
    return tuple(layers), found
