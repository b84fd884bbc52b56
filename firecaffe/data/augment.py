"""Random crops and mirroring for a whole batch at once, and normalization.

What is drawn for a sample is a function of (seed, epoch, sample), so it does not depend on the
batch, the leaf or the worker that the sample is in:

    top    = hash64(seed, CROP_TOP,  epoch, sample) mod (H + 2 pad - h + 1)
    left   = hash64(seed, CROP_LEFT, epoch, sample) mod (W + 2 pad - w + 1)
    mirror = hash64(seed, MIRROR,    epoch, sample) mod 2

with mod as in `hash.below`. Shapes: B samples, C channels, H x W before and h x w after cropping.

Inception's augmentation: a box of random area and proportions, scaled to one size.

A box has 8 to 100 % of the image's area and proportions of 3/4 to 4/3; the first of ten draws that
fits is taken, and after ten the largest one in the middle that has such proportions. What is drawn
is a function of (seed, epoch, sample), as in `augment`; attempt k takes the numbers 4 k to 4 k + 3:

    u = (hash64(seed, BOX, epoch, sample, number) >> 11 without sign) / 2^53

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
"""Random crop and mirror; a random box scaled to one size (`random_resized_crop`); nothing."""


STREAMS = torch.tensor([[Stream.CROP_TOP], [Stream.CROP_LEFT], [Stream.MIRROR]])
"""What a crop and a mirror are drawn by."""


def cropped_shape(images_HW: tuple[int, int], crop: int, pad: int) -> tuple[int, int]:
    """Rows and columns after a crop; `crop` 0 keeps the image's own size.

    Raises:
        ValueError: the crop is larger than the padded image, or a size is negative.
    """
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
    """Pad with zeros on all sides, cut `crop` x `crop` at a random place, mirror every other one.

    `samples_B` are the numbers of the samples in the data set (int64). Crop 0 keeps the size: with
    padding, the image is moved by up to `pad` pixels.
    """
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
    # By numpy, whose slices cost less than a copy of so few bytes.
    cuts = zip(images_BChw.numpy(), top_B, left_B, flags_B, strict=True)
    for place, (cut_Chw, top, left, flag) in enumerate(cuts):
        # A crop of a mirrored image starts as far from the other edge.
        start = room[1] - 1 - left if flag else left
        cut_Chw[...] = sides[flag][place, :, top : top + rows, start : start + columns]
    return images_BChw


def crops_and_mirrors(
    samples_B: Tensor, seed: int, epoch: int, room: tuple[int, int], mirror: bool
) -> tuple[list[int], list[int], list[int]]:
    """Top, left and whether it is mirrored, for each sample. room: how many tops and lefts."""
    hashes_3B = hash64(seed, STREAMS, epoch, samples_B)
    bounds_3 = torch.tensor([*room, 2 if mirror else 1])
    top_B, left_B, flags_B = below(hashes_3B, bounds_3.view(-1, 1)).tolist()
    return top_B, left_B, flags_B


def center_crop(images_BCHW: Tensor, crop: int = 0, pad: int = 0) -> Tensor:
    """Pad with zeros and cut from the center: what a random crop becomes in a test.

    The first row is (H + 2 pad - h) // 2, as in Caffe's data transformer.
    """
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
    """(x - mean) / std in float32, on `device`; uint8 images are first divided by 255.

    `mean` and `std` have one value for all channels or one for each; empty leaves the step out. The
    images travel as they are, a uint8 pixel being a quarter of a float32 one.
    """
    images_BCHW = images_BCHW.to(device, non_blocking=True)
    # A new tensor: images may be the data set's own, and the rest is done in place.
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
    # Kept: a copy from the host to a GPU waits until that has done all that is queued.
    return torch.tensor(values, dtype=torch.float32, device=device).view(1, -1, 1, 1)


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
