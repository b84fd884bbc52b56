"""The batches of training steps and evaluations, ready on the device."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from firecaffe.data.augment import normalize
from firecaffe.data.config import DataConfig
from firecaffe.data.dataset import Dataset, ask, is_images, layout_of
from firecaffe.data.image_batches import FETCH, cut_for_test, output_shape, to_test
from firecaffe.data.layout import Batch, Layout, Leaf, map_batch, num_samples
from firecaffe.data.prefetch import ahead, sample_bytes
from firecaffe.data.sample_order import SampleOrder
from firecaffe.errors import DataError


def given_layout(dataset: Dataset, config: DataConfig) -> Layout:
    """Return the layout that the network receives. Raises RecipeError if settings do not fit."""
    if is_images(dataset):
        shape = output_shape(dataset, config)
        return Layout(Leaf(shape, torch.float32), Leaf((), torch.int64))
    return layout_of(dataset)


@dataclass(frozen=True)
class Batches:
    """A run's training batches: functions of the order's seed, the step and the leaf alone."""

    dataset: Dataset
    order: SampleOrder
    config: DataConfig
    device: torch.device | str = "cpu"

    @cached_property
    def layout(self) -> Layout:
        return given_layout(self.dataset, self.config)

    def train_batch(self, step: int, leaf: int) -> Batch:
        """Return inputs and targets on the device; fewer at an epoch's end, down to 0.

        Images are float32, augmented and normalized (BChw), labels int64 (B). Raises DataError if
        the data set ends before the number of samples that it states.
        """
        return self.on_device(*self.host_batch(step, leaf))

    def host_batch(self, step: int, leaf: int) -> Batch:
        """Return a batch on the host: images as they are stored, augmented but not normalized."""
        samples_B = self.order.micro_batch(step, leaf)
        if len(samples_B) == 0:  # at an epoch's end; data sets need not support empty requests
            return self.layout.zeros(0)
        dataset, seed, epoch = self.dataset, self.order.seed, self.order.epoch(step)
        if is_images(dataset):
            fetch = partial(FETCH[self.config.augment], dataset, self.config, seed, epoch)
        else:
            fetch = partial(ask, dataset, seed=seed, epoch=epoch)
        return _fetch(fetch, self.dataset, samples_B)

    def on_device(self, inputs: Any, targets: Any) -> Batch:
        """Move a host batch to the device, and normalize images there."""
        if is_images(self.dataset):
            config = self.config
            return (
                normalize(inputs, config.mean, config.std, self.device),
                targets.to(self.device, non_blocking=True),
            )
        return to_device((inputs, targets), self.device)


def to_device(batch: Batch, device: torch.device | str) -> Batch:
    return map_batch(lambda tensor: tensor.to(device, non_blocking=True), batch)


Fetch = Callable[[Tensor], Batch]


def _fetch(fetch: Fetch, dataset: Dataset, samples_B: Tensor) -> Batch:
    try:
        batch = fetch(samples_B)
    except (IndexError, EOFError, StopIteration) as error:
        raise DataError(
            f"the data end before sample {int(samples_B.max())} of {len(dataset)} "
            f"({type(error).__name__}: {error})"
        ) from error
    inputs, targets = batch
    rows = num_samples(inputs, ()), num_samples(inputs, targets)
    if not rows[0] == rows[1] == len(samples_B):
        what = ("images", "labels") if is_images(dataset) else ("inputs", "targets")
        raise DataError(
            f"{len(samples_B)} samples were asked for, {rows[0]} {what[0]} and "
            f"{rows[1]} {what[1]} came; the data set says that it holds {len(dataset)}"
        )
    return batch


def eval_batches(
    dataset: Dataset,
    batch_size: int,
    rank: int,
    world_size: int,
    *,
    config: DataConfig,
    device: torch.device | str = "cpu",
) -> Iterator[tuple[int, Any, Any]]:
    """Yield (batch number, inputs, targets) of one rank's part of an evaluation, center-cropped.

    Batch b is samples [b batch_size, (b + 1) batch_size) of the data set, for rank b mod
    world_size. So each sample counts once, and sums by batch number do not depend on the ranks.
    """
    fetch: Fetch = to_test(dataset, config) if is_images(dataset) else dataset.batch
    numbers = range(rank, -(-len(dataset) // batch_size), world_size)

    def fetched(number: int) -> Batch:
        start = number * batch_size
        samples_B = torch.arange(start, min(start + batch_size, len(dataset)))
        return _fetch(fetch, dataset, samples_B)

    calls = (partial(fetched, number) for number in numbers)
    made = ahead(calls, dataset, batch_size * sample_bytes(dataset))
    for number, (inputs, targets) in zip(numbers, made, strict=True):
        if is_images(dataset):
            images_BChw = cut_for_test(inputs, dataset, config)
            inputs = normalize(images_BChw, config.mean, config.std, device)
            yield number, inputs, targets.to(device)
        else:
            yield number, *to_device((inputs, targets), device)
