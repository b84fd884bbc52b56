"""What a step trains on and what an evaluation counts: batches, ready on the device."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from firecaffe.data.augment import center_crop, cropped_shape, normalize, random_crop_mirror
from firecaffe.data.dataset import Dataset
from firecaffe.data.order import SampleOrder
from firecaffe.data.source import DataConfig
from firecaffe.errors import DataError, RecipeError


def output_shape(dataset: Dataset, config: DataConfig) -> tuple[int, int, int]:
    """Shape of the images that a network is given: the data set's, cropped.

    Raises:
        RecipeError: crop, pad, mean or std do not fit the data set's images.
    """
    channels, rows, columns = dataset.sample_CHW
    try:
        rows, columns = cropped_shape((rows, columns), config.crop, config.pad)
    except ValueError:
        raise RecipeError(
            f"data.crop is {config.crop} with data.pad {config.pad} on images of "
            f"{rows} x {columns}, expected pad from 0 and crop from 0 to the shorter side plus "
            "twice the padding"
        ) from None
    for name, values in (("mean", config.mean), ("std", config.std)):
        if len(values) not in (0, 1, channels):
            raise RecipeError(
                f"data.{name} has {len(values)} values, expected none, 1 or {channels} "
                "(the number of channels)"
            )
    if any(value <= 0 for value in config.std):
        raise RecipeError(f"data.std is {config.std}, expected values above 0")
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

        Raises: DataError where the data end before the samples that they have said to hold.
        """
        samples_B = self.order.micro_batch(step, leaf)
        images_BCHW, labels_B = _fetch(self.dataset, samples_B)
        images_BChw = random_crop_mirror(
            images_BCHW,
            samples_B,
            seed=self.order.seed,
            epoch=self.order.epoch(step),
            crop=self.config.crop,
            pad=self.config.pad,
            mirror=self.config.mirror,
        )
        return (
            normalize(images_BChw, self.config.mean, self.config.std, self.device),
            labels_B.to(self.device),
        )


def _fetch(dataset: Dataset, samples_B: Tensor) -> tuple[Tensor, Tensor]:
    """Raises: DataError where the data set gives fewer samples than were asked for."""
    try:
        images_BCHW, labels_B = dataset.batch(samples_B)
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
    num_batches = -(-len(dataset) // batch_size)
    for number in range(rank, num_batches, world_size):
        start = number * batch_size
        samples_B = torch.arange(start, min(start + batch_size, len(dataset)))
        images_BCHW, labels_B = _fetch(dataset, samples_B)
        images_BChw = center_crop(images_BCHW, config.crop, config.pad)
        yield (
            number,
            normalize(images_BChw, config.mean, config.std, device),
            labels_B.to(device),
        )
