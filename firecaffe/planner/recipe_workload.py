"""Makes workloads from a recipe or a network's name, and finds a recipe's cluster."""

import re
from dataclasses import dataclass, replace

from firecaffe.data import (
    Data,
    DataConfig,
    Layout,
    TensorDataset,
    is_images,
    num_classes,
    open_data,
)
from firecaffe.data.augment import cropped_shape
from firecaffe.data.datasets import num_held_out
from firecaffe.data.decode import DecodedSet
from firecaffe.data.generated import NUM_TRAIN
from firecaffe.data.image_folder import ImageFolder
from firecaffe.data.packed import PackedPart
from firecaffe.errors import DataError, RecipeError
from firecaffe.models import MODELS, ModelConfig
from firecaffe.planner.cluster import Cluster, load_cluster
from firecaffe.planner.workload import (
    IMAGENET_CHW,
    IMAGENET_IMAGES,
    Layers,
    Workload,
    images_of,
    input_of,
    layers_of,
    vectors_of,
)
from firecaffe.recipe.checked_recipe import CheckedRecipe
from firecaffe.recipe.fits import check_batch
from firecaffe.recipe.sections import Recipe
from firecaffe.resume_advice import option
from firecaffe.user_code import is_caffe, is_reference
from firecaffe.value_checks import MAX_MICRO_BATCHES

JPEG_BYTES = 110_000.0
"""Mean size of a photo of ImageNet's training set: 138 GB for 1.28 million."""


@dataclass(frozen=True)
class Samples:
    sample_CHW: tuple[int, ...]
    """The shape of images of classes; else empty."""
    num_classes: int | None
    count: int
    stored_bytes: float = 0.0
    """Size of one image, if images are read from storage as they are needed."""
    assumption: str = ""


KNOWN_SAMPLES = {
    "fashion-mnist": Samples((1, 28, 28), 10, 60_000),
    "mnist": Samples((1, 28, 28), 10, 60_000),
    "cifar10": Samples((3, 32, 32), 10, 50_000),
    "generated": Samples((1, 28, 28), 10, NUM_TRAIN),
}


NO_DATA_TIME = (
    "how long these data take to give a sample is not known, and not in the forecast unless the "
    "cluster file has it from runs (plan --runs)"
)


def workload_of(recipe: CheckedRecipe, data: Data | None = None) -> Workload:
    """Make a recipe's workload; a missing folder of images is taken for ImageNet.

    data: the recipe's data, if already open. Raises: RecipeError; OwnCodeError from a user's code.
    """
    train = recipe.train
    samples, layout = _samples(recipe) if data is None else _samples_of(data)
    check_batch(train, samples.count)
    steps_per_epoch = -(-samples.count // train.global_batch_size)
    vectors = vectors_of(recipe.solver)
    layers = _trained_layers(recipe.model, layout, samples.num_classes)
    return Workload(
        model=recipe.model.label,
        layers=layers.works,
        activation_bytes=layers.activation_bytes,
        frozen_bytes=layers.frozen_bytes,
        layout=layout,
        num_classes=samples.num_classes or 0,
        global_batch_size=train.global_batch_size,
        micro_batch_size=train.micro_batch_size,
        samples=samples.count,
        steps=train.num_steps(steps_per_epoch),
        # A moving average of the weights is one more vector.
        optimizer_vectors=vectors.kept + (train.ema_decay > 0),
        update_vectors=vectors.made,
        autocast=train.autocast,
        channels_last=train.channels_last,
        bucket_bytes=recipe.exchange.bucket_bytes,
        stored_bytes=samples.stored_bytes,
        shared_memory=recipe.exchange.shared_memory,
        exchange=recipe.exchange.algorithm,
        compressor=recipe.exchange.compressor,
        any_shares=recipe.synchrony.measures_shares,
        compressor_level=recipe.exchange.compressor_level,
        update_at=recipe.exchange.update_at,
        has_whole_shards=recipe.updates_whole_layers,
        threads=train.threads,
        eval_batch_size=train.eval_batch_size,
        assumption=samples.assumption,
    )


def workload_of_model(
    config: ModelConfig,
    input_CHW: tuple[int, int, int] | None,
    global_batch_size: int,
    micro_batch_size: int,
) -> Workload:
    """Make a network's workload on these images or its authors'; ImageNet's come from storage."""
    shape = input_CHW or input_of(config)
    row = MODELS.get(config.name)
    layout = images_of(shape)
    is_imagenet = shape == IMAGENET_CHW if row is None else row.num_classes == 1000
    if micro_batch_size < 1 or global_batch_size < 1 or global_batch_size % micro_batch_size:
        raise RecipeError(
            f"{option('global_batch_size')} is {global_batch_size}; it must be a multiple of "
            f"{option('micro_batch_size')}, {micro_batch_size}, and both at least 1"
        )
    if global_batch_size // micro_batch_size > MAX_MICRO_BATCHES:
        raise RecipeError(
            f"{option('global_batch_size')} is {global_batch_size}, which is "
            f"{global_batch_size // micro_batch_size:,} micro-batches of {micro_batch_size}; there "
            f"may be at most {MAX_MICRO_BATCHES:,}"
        )
    num_classes = None if row is None else row.num_classes
    layers = _trained_layers(config, layout, num_classes)
    return Workload(
        model=config.label,
        layers=layers.works,
        activation_bytes=layers.activation_bytes,
        frozen_bytes=layers.frozen_bytes,
        layout=layout,
        num_classes=num_classes or 0,
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        samples=IMAGENET_IMAGES if is_imagenet else 0,
        stored_bytes=JPEG_BYTES if is_imagenet else 0.0,
    )


def _trained_layers(config: ModelConfig, layout: Layout, num_classes: int | None) -> Layers:
    layers = layers_of(config, layout, num_classes)
    if not any(layer.shapes for layer in layers.works):
        raise RecipeError(
            f"model.name {config.name!r} has no parameter to train; name a network that has some"
        )
    return layers


def _samples(recipe: Recipe) -> tuple[Samples, Layout]:
    config = recipe.data
    if config.name in KNOWN_SAMPLES:
        samples = KNOWN_SAMPLES[config.name]
        held = num_held_out(samples.count, config.hold_out)
        return replace(samples, count=samples.count - held), _cropped(samples, config)
    try:
        data = open_data(config)
    except DataError:
        if is_reference(config.name) or is_caffe(config.name):
            raise
        side = config.resize
        place = config.path or "data.path"
        said = f"{place} has no images that can be read; ImageNet's are taken for them"
        samples = Samples((3, side, side), 1000, IMAGENET_IMAGES, JPEG_BYTES, said)
        return samples, _cropped(samples, config)
    return _samples_of(data)


def _samples_of(data: Data) -> tuple[Samples, Layout]:
    train = data.train
    stored_bytes = 0.0
    if isinstance(train, DecodedSet) and isinstance(train.source, PackedPart | ImageFolder):
        stored_bytes = train.source.image_bytes()
    shape = train.sample_CHW if is_images(train) else ()
    is_unknown = not stored_bytes and not isinstance(train, TensorDataset)
    said = NO_DATA_TIME if is_unknown else ""
    assert data.layout is not None
    return Samples(shape, num_classes(train), len(train), stored_bytes, said), data.layout


def _cropped(samples: Samples, config: DataConfig) -> Layout:
    channels, rows, columns = samples.sample_CHW
    try:
        rows, columns = cropped_shape((rows, columns), config.crop, config.pad)
    except ValueError as error:
        raise RecipeError(f"data.crop is {config.crop}: {error}") from error
    return images_of((channels, rows, columns))


CPU_CLUSTER = "cpu-host"
BY_DEVICE = {
    "H200": "h200",
    "H100": "dgx-h100",
    "A100": "dgx-a100",
    "V100": "ec2-p3",
    "P100": "dgx1-p100",
    "K80": "ec2-p2",
    "K20X": "titan",
}


def cluster_for(recipe: Recipe, gpu: str = "") -> Cluster | None:
    """Find the recipe's cluster, or one for the GPU or CPU, or None. Raises: RecipeError."""
    if recipe.run.cluster:
        return load_cluster(recipe.run.cluster)
    parts = re.split(r"[^A-Za-z0-9]+", gpu)
    name = next((name for part, name in BY_DEVICE.items() if part in parts), "")
    name = name if gpu else CPU_CLUSTER
    return load_cluster(name) if name else None
