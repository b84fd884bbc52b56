"""From a recipe, or a network's name, to the workload that the planner prices."""

from dataclasses import dataclass

import torch
from torch import nn

from firecaffe.data import open_data, output_shape
from firecaffe.data.augment import cropped_shape
from firecaffe.data.generated import NUM_TRAIN
from firecaffe.errors import DataError, RecipeError
from firecaffe.models import MODELS
from firecaffe.plan.accuracy import IMAGENET_IMAGES
from firecaffe.plan.workload import FLOAT_BYTES, Workload, layers_of
from firecaffe.recipe import Recipe, check_recipe
from firecaffe.train.solver import make_optimizer

JPEG_BYTES = 110_000.0
"""Of a photo of ImageNet's training set, on average: 138 GB for 1.28 million."""


@dataclass(frozen=True)
class Samples:
    """What is known of a data set without its files."""

    sample_CHW: tuple[int, int, int]
    num_classes: int
    count: int
    stored_bytes: float = 0.0
    """Of one image, where images are read from storage as they are needed."""


KNOWN = {
    "fashion-mnist": Samples((1, 28, 28), 10, 60_000),
    "mnist": Samples((1, 28, 28), 10, 60_000),
    "cifar10": Samples((3, 32, 32), 10, 50_000),
    "generated": Samples((1, 28, 28), 10, NUM_TRAIN),
}


def workload_of(recipe: Recipe) -> Workload:
    """A recipe's. A folder of images that is not here is taken for ImageNet.

    Raises: RecipeError, in one line.
    """
    check_recipe(recipe)
    train = recipe.train
    samples, shape = _samples(recipe)
    steps_per_epoch = -(-samples.count // train.global_batch_size)
    return _workload(
        recipe.model.name,
        shape,
        samples.num_classes,
        Workload(
            model=recipe.model.name,
            layers=(),
            activation_bytes=0.0,
            input_bytes=0.0,
            global_batch_size=train.global_batch_size,
            micro_batch_size=train.micro_batch_size,
            samples=samples.count,
            steps=train.steps or train.epochs * steps_per_epoch,
            optimizer_vectors=_optimizer_vectors(recipe),
            autocast=train.autocast,
            bucket_bytes=recipe.exchange.bucket_bytes,
            stored_bytes=samples.stored_bytes,
            compressor_level=recipe.exchange.compressor_level,
        ),
    )


def workload_of_model(name: str, global_batch_size: int, micro_batch_size: int) -> Workload:
    """A network's, on its authors' images; those of ImageNet's size are read from storage."""
    if name not in MODELS:
        layers_of(name, None, None)  # says what there is
    model = MODELS[name]
    is_imagenet = model.num_classes == 1000
    if micro_batch_size < 1 or global_batch_size < 1 or global_batch_size % micro_batch_size:
        raise RecipeError(
            f"--global-batch-size is {global_batch_size}; it must be a multiple of "
            f"--micro-batch-size, {micro_batch_size}, and both at least 1"
        )
    return _workload(
        name,
        model.input_CHW,
        model.num_classes,
        Workload(
            model=name,
            layers=(),
            activation_bytes=0.0,
            input_bytes=0.0,
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            samples=IMAGENET_IMAGES if is_imagenet else 0,
            stored_bytes=JPEG_BYTES if is_imagenet else 0.0,
        ),
    )


def _workload(
    name: str, shape: tuple[int, int, int], num_classes: int, words: Workload
) -> Workload:
    layers, found = layers_of(name, shape, num_classes)
    channels, rows, columns = shape
    kept = sum(row.output_activation_bytes for row in found.layers)
    return Workload(
        **{
            **words.__dict__,
            "layers": layers,
            "activation_bytes": float(kept),
            "input_bytes": float(FLOAT_BYTES * channels * rows * columns),
        }
    )


def _samples(recipe: Recipe) -> tuple[Samples, tuple[int, int, int]]:
    """The data set's, and the shape that the network is given."""
    config = recipe.data
    if config.name in KNOWN:
        samples = KNOWN[config.name]
    else:
        try:
            train = open_data(config).train
        except DataError:
            side = config.resize
            samples = Samples((3, side, side), 1000, IMAGENET_IMAGES, JPEG_BYTES)
        else:
            samples = Samples(train.sample_CHW, train.num_classes, len(train), JPEG_BYTES)
            return samples, output_shape(train, config)
    channels, rows, columns = samples.sample_CHW
    try:
        rows, columns = cropped_shape((rows, columns), config.crop, config.pad)
    except ValueError as error:
        raise RecipeError(f"data.crop is {config.crop}: {error}") from error
    return samples, (channels, rows, columns)


def _optimizer_vectors(recipe: Recipe) -> int:
    """Vectors as long as the weights that the solver keeps: found by a step on one number."""
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = make_optimizer([parameter], recipe.solver)
    parameter.grad = torch.ones(1)
    optimizer.step()
    state = optimizer.state[parameter].values()
    return sum(1 for value in state if isinstance(value, torch.Tensor) and value.dim() == 1)
