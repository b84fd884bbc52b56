"""Random crops and mirroring for a whole batch at once, and normalization.

What is drawn for a sample is a function of (seed, epoch, sample), so it does not depend on the
batch, the leaf or the worker that the sample is in:

    top    = hash64(seed, CROP_TOP,  epoch, sample) mod (H + 2 pad - h + 1)
    left   = hash64(seed, CROP_LEFT, epoch, sample) mod (W + 2 pad - w + 1)
    mirror = hash64(seed, MIRROR,    epoch, sample) mod 2

with mod as in `hash.below`. Shapes: B samples, C channels, H x W before and h x w after cropping.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad as pad_edges

from firecaffe.data.hash import Stream, below, hash64


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
    moves = (rows, columns) != (height, width) or pad > 0
    if not moves and not mirror:
        return images_BCHW
    columns_Bw = torch.arange(columns).expand(len(samples_B), columns)
    if mirror:
        flags_B = below(hash64(seed, Stream.MIRROR, epoch, samples_B), 2)
        columns_Bw = torch.where(flags_B.view(-1, 1) == 1, columns_Bw.flip(1), columns_Bw)
    rows_Bh = torch.arange(rows).expand(len(samples_B), rows)
    if moves:
        top_B = below(hash64(seed, Stream.CROP_TOP, epoch, samples_B), height + 2 * pad - rows + 1)
        left_B = below(
            hash64(seed, Stream.CROP_LEFT, epoch, samples_B), width + 2 * pad - columns + 1
        )
        rows_Bh = rows_Bh + top_B.view(-1, 1)
        columns_Bw = columns_Bw + left_B.view(-1, 1)
    return _take(pad_edges(images_BCHW, [pad] * 4), rows_Bh, columns_Bw)


def _take(images_BCHW: Tensor, rows_Bh: Tensor, columns_Bw: Tensor) -> Tensor:
    """result[b, c, i, j] = images[b, c, rows[b, i], columns[b, j]]."""
    batch, channels, _, width = images_BCHW.shape
    pixels_Bhw = rows_Bh.unsqueeze(2) * width + columns_Bw.unsqueeze(1)
    index_BCP = pixels_Bhw.flatten(1).unsqueeze(1).expand(-1, channels, -1)
    flat_BCP = images_BCHW.flatten(2).gather(2, index_BCP)
    return flat_BCP.view(batch, channels, rows_Bh.shape[1], columns_Bw.shape[1])


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
    images_BCHW = images_BCHW.to(device)
    # A copy even of float32 images, which may be the data set's own: the rest is done in place.
    result_BCHW = images_BCHW.to(torch.float32, copy=True)
    if images_BCHW.dtype == torch.uint8:
        result_BCHW /= 255
    if len(mean) > 0:
        result_BCHW -= _per_channel(mean, result_BCHW)
    if len(std) > 0:
        result_BCHW /= _per_channel(std, result_BCHW)
    return result_BCHW


def _per_channel(values: Sequence[float], images_BCHW: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=images_BCHW.device).view(1, -1, 1, 1)
