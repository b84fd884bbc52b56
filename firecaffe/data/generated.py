"""A data set that needs no files: ten classes of shifted, noisy patterns, made from a seed.

It is for trials if no data can be downloaded. It uses only integer arithmetic on `hash64`, so a
seed gives the same bytes everywhere. Class c has a pattern of 7 x 7 random gray blocks of 4 x 4
pixels. Sample i shows the pattern of class i mod 10, moved around the edges by up to 3 pixels in
each direction, under noise:

    pixel = (pattern + 3 * noise) // 4        pattern, noise: 0 ... 255
"""

import torch
from torch import Tensor

from firecaffe.data.dataset import TensorDataset
from firecaffe.data.hash import Stream, below, hash64

NUM_TRAIN = 10_000
NUM_TEST = 2_000
_NUM_CLASSES = 10
_BLOCKS = 7
_BLOCK_PIXELS = 4
_SIDE = _BLOCKS * _BLOCK_PIXELS
_MAX_SHIFT = 3


def generate(
    seed: int = 0, num_train: int = NUM_TRAIN, num_test: int = NUM_TEST
) -> tuple[TensorDataset, TensorDataset]:
    """Make ten classes of equal size, 1 x 28 x 28, uint8. Test samples follow training samples."""
    train = _samples(seed, torch.arange(num_train))
    test = _samples(seed, torch.arange(num_train, num_train + num_test))
    return train, test


def _patterns(seed: int) -> Tensor:
    classes = torch.arange(_NUM_CLASSES).view(-1, 1, 1)
    blocks = torch.arange(_BLOCKS**2).view(1, _BLOCKS, _BLOCKS)
    coarse = below(hash64(seed, Stream.GENERATED_PATTERN, classes, blocks), 256).to(torch.int16)
    return coarse.repeat_interleave(_BLOCK_PIXELS, 1).repeat_interleave(_BLOCK_PIXELS, 2)


def _samples(seed: int, numbers_N: Tensor) -> TensorDataset:
    labels_N = numbers_N % _NUM_CLASSES
    # Each hash gives eight noise pixels, one per byte, the lowest byte first.
    hashes = hash64(
        seed,
        Stream.GENERATED_NOISE,
        numbers_N.view(-1, 1, 1),
        torch.arange(_SIDE**2 // 8).view(-1, 1),
    )
    noise_NHW = ((hashes >> torch.arange(0, 64, 8)) & 255).to(torch.int16).view(-1, _SIDE, _SIDE)
    shifts_N2 = below(
        hash64(seed, Stream.GENERATED_SHIFT, numbers_N.view(-1, 1), torch.arange(2)),
        2 * _MAX_SHIFT + 1,
    )
    along = torch.arange(_SIDE)
    rows_NH = (along + shifts_N2[:, :1] - _MAX_SHIFT) % _SIDE
    columns_NW = (along + shifts_N2[:, 1:] - _MAX_SHIFT) % _SIDE
    pattern_NHW = _patterns(seed)[
        labels_N.view(-1, 1, 1), rows_NH.unsqueeze(2), columns_NW.unsqueeze(1)
    ]
    images_NHW = ((pattern_NHW + 3 * noise_NHW) // 4).to(torch.uint8)
    return TensorDataset(images_NHW.unsqueeze(1), labels_N, _NUM_CLASSES)
