"""Crops and normalization of images of classes, in training and in a test."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad as pad_edges

from firecaffe.data.augment import (
    box,
    center_crop,
    cropped_shape,
    crops_and_mirrors,
    cut,
    draws,
    middle,
    random_crop_mirror,
)
from firecaffe.data.config import DataConfig
from firecaffe.data.dataset import Images, ask
from firecaffe.data.decode import scale
from firecaffe.data.decoded import DecodedSet
from firecaffe.errors import RecipeError

SMALLEST = torch.finfo(torch.float32).tiny
"""The least number that a division in float32 does not treat as 0."""


def output_shape(dataset: Images, config: DataConfig) -> tuple[int, int, int]:
    """Return the shape of the network's images. Raises RecipeError if settings do not fit them."""
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


def _caffe(
    dataset: Images, config: DataConfig, seed: int, epoch: int, samples_B: Tensor
) -> tuple[Tensor, Tensor]:
    crop, pad, mirror = config.crop, config.pad, config.mirror
    if not isinstance(dataset, DecodedSet):
        images_BCHW, labels_B = ask(dataset, samples_B, seed, epoch)
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
    dataset: Images, config: DataConfig, seed: int, epoch: int, samples_B: Tensor
) -> tuple[Tensor, Tensor]:
    side = config.crop
    draws_BA4 = draws(seed, epoch, samples_B).tolist()
    _, _, flags_B = crops_and_mirrors(samples_B, seed, epoch, (1, 1), config.mirror)

    def cut_box(image_CHW: Tensor, place: int) -> Tensor:
        _, rows, columns = image_CHW.shape
        image_Chw = cut(image_CHW, box(draws_BA4[place], rows, columns), side)
        return image_Chw.flip(2) if flags_B[place] else image_Chw

    if isinstance(dataset, DecodedSet):
        return dataset.transformed(samples_B, cut_box, side)
    images_BCHW, labels_B = ask(dataset, samples_B, seed, epoch)
    cuts = [cut_box(image_CHW, place) for place, image_CHW in enumerate(images_BCHW)]
    shape = (0, images_BCHW.shape[1], side, side)
    return torch.stack(cuts) if cuts else images_BCHW.new_empty(shape), labels_B


def _plain(
    dataset: Images, config: DataConfig, seed: int, epoch: int, samples_B: Tensor
) -> tuple[Tensor, Tensor]:
    images_BCHW, labels_B = ask(dataset, samples_B, seed, epoch)
    return center_crop(images_BCHW, config.crop, config.pad).contiguous(), labels_B


FETCH = {"caffe": _caffe, "inception": _inception, "none": _plain}


def to_test(dataset: Images, config: DataConfig) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Return the function that fetches test images: the center of each, at the training's scale."""
    if config.augment == "inception" and isinstance(dataset, DecodedSet):
        side, shorter = config.crop, config.resize
        return partial(
            dataset.transformed, transform=lambda image, _: middle(image, shorter, side), side=side
        )
    return dataset.batch


def cut_for_test(images_BCHW: Tensor, dataset: Images, config: DataConfig) -> Tensor:
    is_cut = config.augment == "inception" and isinstance(dataset, DecodedSet)
    return images_BCHW if is_cut else center_crop(images_BCHW, config.crop, config.pad)
