"""Inception's augmentation: a box of random area and proportions, scaled to one size.

A box has 8 to 100 % of the image's area and proportions of 3/4 to 4/3; the first of ten draws that
fits is taken, and after ten the largest one in the middle that has such proportions. What is drawn
is a function of (seed, epoch, sample), as in `augment`; attempt k takes the numbers 4 k to 4 k + 3:

    u = (hash64(seed, BOX, epoch, sample, number) >> 11 without sign) / 2^53

Source: Szegedy et al. 2015 (GoogLeNet), with the usual ten draws.
"""

from math import exp, log, sqrt

import torch
from torch import Tensor

from firecaffe.data.decode import scale, scale_shorter_side
from firecaffe.data.hash import Stream, hash64

AREA = (0.08, 1.0)
PROPORTIONS = (3 / 4, 4 / 3)
ATTEMPTS = 10

Box = tuple[int, int, int, int]
"""Top, left, rows, columns."""


def draws(seed: int, epoch: int, samples_B: Tensor) -> Tensor:
    """Uniform numbers in [0, 1), float64 of B x ATTEMPTS x 4."""
    numbers = torch.arange(4 * ATTEMPTS)
    hashes = hash64(seed, Stream.BOX, epoch, samples_B.view(-1, 1), numbers)
    upper = (hashes >> 11) & ((1 << 53) - 1)
    return (upper.double() / 2**53).view(-1, ATTEMPTS, 4)


def box(draws_A4: list[list[float]], rows: int, columns: int) -> Box:
    """One sample's box, of its draws, in an image of rows x columns."""
    for area, proportions, down, right in draws_A4:
        target = rows * columns * (AREA[0] + area * (AREA[1] - AREA[0]))
        low, high = map(log, PROPORTIONS)
        ratio = exp(low + proportions * (high - low))
        width, height = round(sqrt(target * ratio)), round(sqrt(target / ratio))
        if 0 < width <= columns and 0 < height <= rows:
            top = int(down * (rows - height + 1))
            left = int(right * (columns - width + 1))
            return top, left, height, width
    ratio = min(max(columns / rows, PROPORTIONS[0]), PROPORTIONS[1])
    height = max(1, min(rows, round(columns / ratio)))
    width = max(1, min(columns, round(rows * ratio)))
    return (rows - height) // 2, (columns - width) // 2, height, width


def cut(image_CHW: Tensor, found: Box, side: int) -> Tensor:
    """The box of an image, scaled to side x side."""
    top, left, rows, columns = found
    return scale(image_CHW[:, top : top + rows, left : left + columns], side, side)


def middle(image_CHW: Tensor, shorter: int, side: int) -> Tensor:
    """What a test sees: the shorter side scaled, and side x side cut from the middle."""
    scaled = scale_shorter_side(image_CHW, shorter)
    top, left = ((length - side) // 2 for length in scaled.shape[1:])
    return scaled[:, top : top + side, left : left + side]
