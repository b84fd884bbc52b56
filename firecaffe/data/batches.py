"""What a step trains on and what an evaluation counts: batches, ready on the device."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad as pad_edges

from firecaffe.data.augment import (
    center_crop,
    cropped_shape,
    crops_and_mirrors,
    normalize,
    random_crop_mirror,
)
from firecaffe.data.config import DataConfig
from firecaffe.data.dataset import Dataset
from firecaffe.data.decode import scale
from firecaffe.data.decoded import DecodedSet
from firecaffe.data.order import SampleOrder
from firecaffe.data.prefetch import ahead, image_bytes
from firecaffe.data.random_resized_crop import box, cut, draws, middle
from firecaffe.errors import DataError, RecipeError

SMALLEST = torch.finfo(torch.float32).tiny
"""Least number that a division in float32 does not take for 0."""


def output_shape(dataset: Dataset, config: DataConfig) -> tuple[int, int, int]:
    """Shape of the images that a network is given: the data set's, cropped.

    Raises:
        RecipeError: crop, pad, mean or std do not fit the data set's images.
    """
    channels, rows, columns = dataset.sample_CHW
    side = min(rows, columns)
    try:
        if config.pad > side:
            raise ValueError
        rows, columns = cropped_shape((rows, columns), config.crop, config.pad)
    except ValueError:
        raise RecipeError(
            f"data.crop is {config.crop} with data.pad {config.pad} on images of "
            f"{rows} x {columns}, expected pad from 0 to the shorter side and crop from 0 to that "
            "plus twice the padding"
        ) from None
    for name, values in (("mean", config.mean), ("std", config.std)):
        if len(values) not in (0, 1, channels):
            raise RecipeError(
                f"data.{name} has {len(values)} values, expected none, 1 or {channels} "
                "(the number of channels)"
            )
    if any(value < SMALLEST for value in config.std):
        raise RecipeError(f"data.std is {config.std}, expected values of {SMALLEST:.2g} and more")
    return channels, rows, columns


@dataclass(frozen=True)
class Batches:
    """The training batches of a run, by step and leaf.

    A batch depends on the order's seed, the step and the leaf alone: ask for any of them, on any
    worker, any number of times.
    """

    dataset: Dataset
    order: SampleOrder
    config: DataConfig
    device: torch.device | str = "cpu"

    def train_batch(self, step: int, leaf: int) -> tuple[Tensor, Tensor]:
        """Images (BChw, float32, augmented and normalized) and labels (B, int64) on the device.

        B is the micro-batch size, less in the last step of an epoch, down to 0.

        Raises: DataError if the data end before the samples that they have said to hold.
        """
        return self.on_device(*self.host_batch(step, leaf))

    def host_batch(self, step: int, leaf: int) -> tuple[Tensor, Tensor]:
        """The same before it is moved and normalized: images as they are stored, augmented."""
        samples_B = self.order.micro_batch(step, leaf)
        if len(samples_B) == 0:  # at an epoch's end; no data set is asked for nothing
            shape = output_shape(self.dataset, self.config)
            return torch.empty(0, *shape, dtype=torch.uint8), samples_B
        seed, epoch = self.order.seed, self.order.epoch(step)
        fetch = partial(FETCH[self.config.augment], self.dataset, self.config, seed, epoch)
        return _fetch(fetch, self.dataset, samples_B)

    def on_device(self, images_BChw: Tensor, labels_B: Tensor) -> tuple[Tensor, Tensor]:
        """Moves a host batch and normalizes it there."""
        return (
            normalize(images_BChw, self.config.mean, self.config.std, self.device),
            labels_B.to(self.device, non_blocking=True),
        )


def _caffe(
    dataset: Dataset, config: DataConfig, seed: int, epoch: int, samples_B: Tensor
) -> tuple[Tensor, Tensor]:
    """Random crops, every other one mirrored."""
    crop, pad, mirror = config.crop, config.pad, config.mirror
    if not isinstance(dataset, DecodedSet):
        images_BCHW, labels_B = dataset.batch(samples_B)
        images_BChw = random_crop_mirror(
            images_BCHW, samples_B, seed=seed, epoch=epoch, crop=crop, pad=pad, mirror=mirror
        )
        return images_BChw, labels_B
    _, height, width = dataset.sample_CHW
    rows, columns = cropped_shape((height, width), crop, pad)
    room = (height + 2 * pad - rows + 1, width + 2 * pad - columns + 1)
    top_B, left_B, flags_B = crops_and_mirrors(samples_B, seed, epoch, room, mirror)

    def cut_crop(image_CHW: Tensor, place: int) -> Tensor:
        image_CHW = scale(image_CHW, height, width)
        image_CHW = pad_edges(image_CHW, [pad] * 4) if pad else image_CHW
        top, left = top_B[place], left_B[place]
        image_Chw = image_CHW[:, top : top + rows, left : left + columns]
        return image_Chw.flip(2) if flags_B[place] else image_Chw

    return dataset.transformed(samples_B, cut_crop, crop)


def _inception(
    dataset: Dataset, config: DataConfig, seed: int, epoch: int, samples_B: Tensor
) -> tuple[Tensor, Tensor]:
    """Random boxes scaled to crop x crop, every other one mirrored."""
    side = config.crop
    draws_BA4 = draws(seed, epoch, samples_B).tolist()
    _, _, flags_B = crops_and_mirrors(samples_B, seed, epoch, (1, 1), config.mirror)

    def cut_box(image_CHW: Tensor, place: int) -> Tensor:
        _, rows, columns = image_CHW.shape
        image_Chw = cut(image_CHW, box(draws_BA4[place], rows, columns), side)
        return image_Chw.flip(2) if flags_B[place] else image_Chw

    if isinstance(dataset, DecodedSet):
        return dataset.transformed(samples_B, cut_box, side)
    images_BCHW, labels_B = dataset.batch(samples_B)
    cuts = [cut_box(image_CHW, place) for place, image_CHW in enumerate(images_BCHW)]
    shape = (0, images_BCHW.shape[1], side, side)
    return torch.stack(cuts) if cuts else images_BCHW.new_empty(shape), labels_B


def _plain(
    dataset: Dataset, config: DataConfig, seed: int, epoch: int, samples_B: Tensor
) -> tuple[Tensor, Tensor]:
    """The middle of the images, in training as in a test."""
    images_BCHW, labels_B = dataset.batch(samples_B)
    return center_crop(images_BCHW, config.crop, config.pad).contiguous(), labels_B


FETCH = {"caffe": _caffe, "inception": _inception, "none": _plain}
"""Ways to fetch images, by `data.augment`."""

Fetch = Callable[[Tensor], tuple[Tensor, Tensor]]


def _fetch(fetch: Fetch, dataset: Dataset, samples_B: Tensor) -> tuple[Tensor, Tensor]:
    """Raises: DataError if the data set gives fewer samples than were asked for."""
    try:
        images_BCHW, labels_B = fetch(samples_B)
    except (IndexError, EOFError, StopIteration) as error:
        raise DataError(
            f"the data end before sample {int(samples_B.max())} of {len(dataset)} "
            f"({type(error).__name__}: {error})"
        ) from error
    if not len(images_BCHW) == len(labels_B) == len(samples_B):
        raise DataError(
            f"{len(samples_B)} samples were asked for, {len(images_BCHW)} images and "
            f"{len(labels_B)} labels came; the data set says that it holds {len(dataset)}"
        )
    return images_BCHW, labels_B


def eval_batches(
    dataset: Dataset,
    batch_size: int,
    rank: int,
    world_size: int,
    *,
    config: DataConfig,
    device: torch.device | str = "cpu",
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """One rank's part of an evaluation: (batch number, images BChw, labels B), center-cropped.

    Batch b is samples [b batch_size, (b + 1) batch_size) of the data set, cut off at its end, and
    belongs to rank b mod world_size. So every sample is counted by exactly one rank, a batch is the
    same however many ranks there are, and what is computed per batch can be summed by batch number.
    """
    fetch: Fetch = dataset.batch
    crop, pad = config.crop, config.pad
    if config.augment == "inception" and isinstance(dataset, DecodedSet):
        side, shorter, crop = config.crop, config.resize, 0
        fetch = partial(
            dataset.transformed, transform=lambda image, _: middle(image, shorter, side), side=side
        )
    numbers = range(rank, -(-len(dataset) // batch_size), world_size)

    def fetched(number: int) -> tuple[Tensor, Tensor]:
        start = number * batch_size
        samples_B = torch.arange(start, min(start + batch_size, len(dataset)))
        return _fetch(fetch, dataset, samples_B)

    calls = (partial(fetched, number) for number in numbers)
    made = ahead(calls, dataset, batch_size * image_bytes(dataset))
    for number, (images_BCHW, labels_B) in zip(numbers, made, strict=True):
        images_BChw = center_crop(images_BCHW, crop, pad)
        yield (
            number,
            normalize(images_BChw, config.mean, config.std, device),
            labels_B.to(device),
        )
