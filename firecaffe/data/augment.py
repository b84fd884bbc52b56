"""Random crops and mirroring for a whole batch at once, and normalization.

What is drawn for a sample is a function of (seed, epoch, sample), so it does not depend on the
batch, the leaf or the worker that the sample is in:

    top    = hash64(seed, CROP_TOP,  epoch, sample) mod (H + 2 pad - h + 1)
    left   = hash64(seed, CROP_LEFT, epoch, sample) mod (W + 2 pad - w + 1)
    mirror = hash64(seed, MIRROR,    epoch, sample) mod 2

with mod as in `hash.below`. Shapes: B samples, C channels, H x W before and h x w after cropping.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad as pad_edges

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
