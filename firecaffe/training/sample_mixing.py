"""Mixes or partly erases training samples, on the device, micro-batch by micro-batch.

Draws are a function of (seed, step, micro-batch, place), and a sample's partner is its predecessor
in the micro-batch, so the number of workers changes nothing.

    mixup    x = share x + (1 - share) partner                   share from Beta(alpha, alpha)
    cutmix   a box of 1 - share of the image is the partner's
    erasing  a box of some images is 0, which is the mean where data.mean is subtracted

The loss of mixed samples is that of their own and of their partners' targets, weighted by shares.
For cross entropy this equals soft targets; it works for every loss.

Source: Zhang et al. 2018, arXiv 1710.09412; Yun et al. 2019, arXiv 1905.04899; Zhong et al. 2020,
arXiv 1708.04896; boxes, partners and ranges as torchvision has them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import exp, log, sqrt
from typing import Any

import torch
from torch import Tensor

from firecaffe.data import DataConfig
from firecaffe.data.hash import Stream, hash64
from firecaffe.errors import RecipeError
from firecaffe.tasks import Loss

# Ranges of an erased box: its share of the image's area, and its rows divided by its columns.
ERASED_SHARE, ERASED_RATIO = (0.02, 0.33), (0.3, 3.3)

# the most boxes that are drawn; if none of them fits, nothing is erased
TRIES = 10


@dataclass(frozen=True)
class Mixed:
    inputs: Tensor
    targets: Any
    partners: Any = None
    """The targets of the samples that are mixed in; None if none are."""
    share: float = 1.0
    """The weight of `targets`; the rest is the partners'."""

    def loss(self, loss: Loss, outputs: Any) -> Tensor:
        target_loss = loss(outputs, self.targets)
        if self.partners is None:
            return target_loss
        return self.share * target_loss + (1 - self.share) * loss(outputs, self.partners)

    @property
    def counted(self) -> Any:
        """The targets that a step's metrics count: those with the larger share."""
        return self.partners if self.partners is not None and self.share < 0.5 else self.targets


@dataclass(frozen=True)
class Mixing:
    """The recipe's mixing. `mixup` and `cutmix` are alpha, or 0; `erasing` is a probability."""

    seed: int
    mixup: float = 0.0
    cutmix: float = 0.0
    erasing: float = 0.0

    def __call__(self, inputs: Tensor, targets: Any, step: int, leaf: int) -> Mixed:
        """Return a mixed copy of a micro-batch. Raises: RecipeError if it cannot be mixed."""
        if not (self.mixup or self.cutmix or self.erasing):
            return Mixed(inputs, targets)
        if self.cutmix or self.erasing:
            _check_images(inputs)
        if self.erasing:
            inputs = self._erased(inputs, step, leaf)
        if not (self.mixup or self.cutmix):
            return Mixed(inputs, targets)
        _check_mixable(inputs, targets, bool(self.cutmix))
        draws = _uniforms(hash64(self.seed, Stream.MIX, step, leaf, torch.arange(4)))
        mixed = Mixed(inputs, targets, targets.roll(1, 0))
        if self.mixup and (not self.cutmix or next(draws) < 0.5):
            share = _beta(self.mixup, next(draws))
            return replace(mixed, inputs=inputs.roll(1, 0).lerp_(inputs, share), share=share)
        return _cut_and_mixed(mixed, _beta(self.cutmix, next(draws)), next(draws), next(draws))

    def _erased(self, images_BCHW: Tensor, step: int, leaf: int) -> Tensor:
        places = torch.arange(len(images_BCHW)).view(-1, 1)
        numbers = torch.arange(2 * TRIES + 3)
        hashes = hash64(self.seed, Stream.ERASE, step, leaf, places, numbers)
        erased_BCHW = images_BCHW.clone()
        for image_CHW, of_image in zip(erased_BCHW, hashes, strict=True):
            draws = _uniforms(of_image)
            if next(draws) < self.erasing:
                top, left, rows, columns = _erased_box(draws, *image_CHW.shape[1:])
                image_CHW[:, top : top + rows, left : left + columns] = 0
        return erased_BCHW


def mixing_of(config: DataConfig, seed: int) -> Mixing:
    return Mixing(seed, config.mixup, config.cutmix, config.erasing)


def _cut_and_mixed(whole: Mixed, share: float, across: float, down: float) -> Mixed:
    # The box is centered on a drawn point, and clipped to the image.
    height, width = whole.inputs.shape[2:]
    half = sqrt(1 - share) / 2
    ends = []
    for size, draw in ((height, down), (width, across)):
        middle, reach = int(draw * size), int(half * size)
        ends.append((max(middle - reach, 0), min(middle + reach, size)))
    (top, bottom), (left, right) = ends
    inputs = whole.inputs.clone()
    inputs[:, :, top:bottom, left:right] = whole.inputs.roll(1, 0)[:, :, top:bottom, left:right]
    cut = (bottom - top) * (right - left) / (height * width)
    return replace(whole, inputs=inputs, share=1 - cut)


def _erased_box(draws: Iterator[float], height: int, width: int) -> tuple[int, int, int, int]:
    # Top, left, rows and columns; no rows if no box fits.
    (least, most), (flat, tall) = ERASED_SHARE, ERASED_RATIO
    sizes = [(next(draws), next(draws)) for _ in range(TRIES)]
    for of_area, of_ratio in sizes:
        area = height * width * (least + (most - least) * of_area)
        ratio = exp(log(flat) + (log(tall) - log(flat)) * of_ratio)
        rows, columns = round(sqrt(area * ratio)), round(sqrt(area / ratio))
        if rows < height and columns < width:
            top, left = next(draws) * (height - rows + 1), next(draws) * (width - columns + 1)
            return int(top), int(left), rows, columns
    return 0, 0, 0, 0


def _beta(alpha: float, draw: float) -> float:
    # Draws from Beta(alpha, alpha) by its inverse distribution function.
    # Imported here, because the import would slow down all commands that mix nothing.
    from scipy.special import betaincinv

    return float(betaincinv(alpha, alpha, draw))


def _uniforms(hashes: Tensor) -> Iterator[float]:
    # Strictly between 0 and 1, from the upper 53 bits of hashes.
    return (((bits >> 11) % 2**53 + 0.5) / 2**53 for bits in hashes.tolist())


def _check_images(inputs: Any) -> None:
    if not (isinstance(inputs, Tensor) and inputs.ndim == 4 and inputs.is_floating_point()):
        given = tuple(inputs.shape) if isinstance(inputs, Tensor) else type(inputs).__name__
        raise RecipeError(
            f"data.cutmix and data.erasing take images of (samples, channels, rows, columns); the "
            f"data give {given}"
        )


def _check_mixable(inputs: Any, targets: Any, is_cut: bool) -> None:
    if not (isinstance(inputs, Tensor) and inputs.is_floating_point()):
        raise RecipeError("data.mixup takes inputs that are one floating-point tensor")
    if not isinstance(targets, Tensor):
        raise RecipeError(
            f"data.mixup and data.cutmix take targets that are one tensor; found a "
            f"{type(targets).__name__}"
        )
    if is_cut and targets.ndim > 2:
        raise RecipeError(
            f"data.cutmix takes targets of whole samples; they are {tuple(targets.shape)}, and a "
            "box of another image has its own: use data.mixup"
        )
