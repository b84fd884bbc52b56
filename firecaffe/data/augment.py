"""Random crops and mirroring for a whole batch, Inception's boxes, and normalization.

Draws depend on (seed, epoch, sample) alone, not on the batch, the leaf or the worker:

    top    = hash64(seed, CROP_TOP,  epoch, sample) mod (H + 2 pad - h + 1)
    left   = hash64(seed, CROP_LEFT, epoch, sample) mod (W + 2 pad - w + 1)
    mirror = hash64(seed, MIRROR,    epoch, sample) mod 2
    u      = (hash64(seed, BOX, epoch, sample, number) >> 11 without sign) / 2^53

with mod as in `hash.below`. Shapes: B samples, C channels, H x W before and h x w after cropping.

A box has 8 to 100 % of the image's area and proportions of 3/4 to 4/3. The first of ten draws that
fits is used, else the largest such box in the center. Attempt k uses the numbers 4 k to 4 k + 3.
Source: Szegedy et al. 2015 (GoogLeNet), with the usual ten draws.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import exp, log, sqrt

import torch
from torch import Tensor
from torch.nn.functional import pad as pad_edges

from firecaffe.data.decode import scale, scale_shorter_side
from firecaffe.data.hash import Stream, below, hash64

AUGMENTS = ("caffe", "inception", "none")


STREAMS = torch.tensor([[Stream.CROP_TOP], [Stream.CROP_LEFT], [Stream.MIRROR]])


def cropped_shape(images_HW: tuple[int, int], crop: int, pad: int) -> tuple[int, int]:
    """Return rows and columns after a crop; 0 keeps the size. Raises ValueError if too large."""
    rows, columns = images_HW
    if crop < 0 or pad < 0 or crop > min(rows, columns) + 2 * pad:
        raise ValueError(f"a crop of {crop} from {rows} x {columns} padded by {pad}")
    return (crop, crop) if crop else (rows, columns)


def random_crop_mirror(
    images_BCHW: Tensor,
    samples_B: Tensor,
    *,
    seed: int,
    epoch: int,
    crop: int = 0,
    pad: int = 0,
    mirror: bool = False,
) -> Tensor:
    """Pad with zeros, crop at a random place, and mirror half. `samples_B`: numbers in the set."""
    height, width = images_BCHW.shape[2:]
    rows, columns = cropped_shape((height, width), crop, pad)
    is_moved = (rows, columns) != (height, width) or pad > 0
    if not is_moved and not mirror:
        return images_BCHW
    room_BCHW = pad_edges(images_BCHW, [pad] * 4) if pad else images_BCHW
    height, width = room_BCHW.shape[2:]
    room = (height - rows + 1, width - columns + 1)
    top_B, left_B, flags_B = crops_and_mirrors(samples_B, seed, epoch, room, mirror)
    sides = [room_BCHW.numpy()]
    if mirror:
        sides.append(room_BCHW.flip(3).numpy())
    images_BChw = images_BCHW.new_empty(len(samples_B), images_BCHW.shape[1], rows, columns)
    # With numpy, since slicing by torch costs more than copying so few bytes.
    cuts = zip(images_BChw.numpy(), top_B, left_B, flags_B, strict=True)
    for place, (cut_Chw, top, left, flag) in enumerate(cuts):
        # In the mirrored image, the crop is as far from the opposite edge.
        start = room[1] - 1 - left if flag else left
        cut_Chw[...] = sides[flag][place, :, top : top + rows, start : start + columns]
    return images_BChw


def crops_and_mirrors(
    samples_B: Tensor, seed: int, epoch: int, room: tuple[int, int], mirror: bool
) -> tuple[list[int], list[int], list[int]]:
    """Draw top, left and mirror for each sample. `room` is the number of tops and lefts."""
    hashes_3B = hash64(seed, STREAMS, epoch, samples_B)
    bounds_3 = torch.tensor([*room, 2 if mirror else 1])
    top_B, left_B, flags_B = below(hashes_3B, bounds_3.view(-1, 1)).tolist()
    return top_B, left_B, flags_B


def center_crop(images_BCHW: Tensor, crop: int = 0, pad: int = 0) -> Tensor:
    """Pad with zeros and crop the center, from row (H + 2 pad - h) // 2 as Caffe does in a test."""
    height, width = images_BCHW.shape[2:]
    rows, columns = cropped_shape((height, width), crop, pad)
    if (rows, columns) == (height, width):
        return images_BCHW
    top = (height + 2 * pad - rows) // 2
    left = (width + 2 * pad - columns) // 2
    padded_BCHW = pad_edges(images_BCHW, [pad] * 4)
    return padded_BCHW[:, :, top : top + rows, left : left + columns]


def normalize(
    images_BCHW: Tensor,
    mean: Sequence[float] = (),
    std: Sequence[float] = (),
    device: torch.device | str | None = None,
) -> Tensor:
    """Return (x - mean) / std in float32 on `device`. Images of uint8 are divided by 255 first."""
    # Moved before conversion: a uint8 pixel has a quarter of the bytes of a float32 one.
    images_BCHW = images_BCHW.to(device, non_blocking=True)
    # A new tensor, since the rest is done in place and the images may belong to the data set.
    result_BCHW = torch.empty(images_BCHW.shape, dtype=torch.float32, device=images_BCHW.device)
    if images_BCHW.dtype == torch.uint8:
        torch.div(images_BCHW, 255, out=result_BCHW)
    else:
        result_BCHW.copy_(images_BCHW)
    if len(mean) > 0:
        result_BCHW -= _per_channel(tuple(mean), result_BCHW.device)
    if len(std) > 0:
        result_BCHW /= _per_channel(tuple(std), result_BCHW.device)
    return result_BCHW


@lru_cache
def _per_channel(values: tuple[float, ...], device: torch.device) -> Tensor:
    # Cached: a copy from the host to a GPU waits until the GPU has finished all queued work.
    return torch.tensor(values, dtype=torch.float32, device=device).view(1, -1, 1, 1)


AREA = (0.08, 1.0)
PROPORTIONS = (3 / 4, 4 / 3)
ATTEMPTS = 10

Box = tuple[int, int, int, int]
"""Top, left, rows and columns."""


def draws(seed: int, epoch: int, samples_B: Tensor) -> Tensor:
    """Draw uniform numbers in [0, 1), float64 of B x ATTEMPTS x 4."""
    numbers = torch.arange(4 * ATTEMPTS)
    hashes = hash64(seed, Stream.BOX, epoch, samples_B.view(-1, 1), numbers)
    upper = (hashes >> 11) & ((1 << 53) - 1)
    return (upper.double() / 2**53).view(-1, ATTEMPTS, 4)


def box(draws_A4: list[list[float]], rows: int, columns: int) -> Box:
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
    top, left, rows, columns = found
    return scale(image_CHW[:, top : top + rows, left : left + columns], side, side)


def middle(image_CHW: Tensor, shorter: int, side: int) -> Tensor:
    """Scale the shorter side and crop side x side from the center, for a test."""
    scaled = scale_shorter_side(image_CHW, shorter)
    top, left = ((length - side) // 2 for length in scaled.shape[1:])
    return scaled[:, top : top + side, left : left + side]
