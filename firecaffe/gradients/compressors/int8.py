"""The codec int8: each row of 256 elements becomes integers from -127 to 127 and one scale.

    scale = largest |x| of the row / 127,   code = round(x / scale),   decoded = code · scale

Rounding is to nearest, ties to even. One scale for 256 elements protects small gradients in other
rows, and lets ranks share out rows. A row of zeros, or one whose scale would not be a normal
float32, has scale 0: it sends zeros, and its memory keeps all. A row with an infinity or a NaN has
that as its scale and decodes to NaN, so that nothing that is not finite becomes finite.

Source: Dettmers 2015, "8-Bit Approximations for Parallelism in Deep Learning"; the code is that of
Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization", section 2, in smaller blocks.
"""

import torch
from torch import Tensor

from firecaffe.gradients.compressors.codec import ROW, RowCodec

LARGEST = 127
SCALE_BYTES = 4


def encode(vector: Tensor) -> Tensor:
    rows = vector.view(-1, ROW)
    scale = rows.abs().amax(dim=1, keepdim=True) / LARGEST
    scale *= scale >= torch.finfo(torch.float32).tiny  # NaN · 0 is NaN still
    steps = rows / torch.where(scale > 0, scale, torch.inf)
    # The conversion of NaN to an integer is undefined. The scale is NaN as well.
    codes = steps.nan_to_num_(nan=0.0).round_().to(torch.int8)
    scale_bytes = scale.view(-1).view(torch.uint8).view(-1, SCALE_BYTES)
    return torch.cat([codes.view(torch.uint8), scale_bytes], dim=1)


def decode(encoded: Tensor) -> Tensor:
    scale = encoded[:, ROW:].clone().view(torch.float32)
    codes = encoded[:, :ROW].view(torch.int8)
    return (codes.to(torch.float32) * scale).view(-1)


INT8 = RowCodec(encode, decode, ROW + SCALE_BYTES, remembers=True)
