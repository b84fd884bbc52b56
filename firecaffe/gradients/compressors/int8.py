"""int8: each row of 256 elements as whole multiples, -127 … 127, of one step of its own.

    scale = largest |x| of the row / 127,   code = round(x / scale),   decoded = code · scale

Rounding is to nearest, ties to even, so an element is off by at most scale / 2, and the memory of
error feedback takes that up. One scale for 256 elements keeps a large gradient in one place from
wiping out small ones elsewhere, and lets ranks share out the rows.

A row of zeros has scale 0, and so has one whose scale would not be a normal float32: it sends
zeros and its memory keeps all. A row with an infinity or a NaN has that as its scale and
decodes to NaN throughout: nothing that is not finite turns finite on the way.

Source: Dettmers 2015, "8-Bit Approximations for Parallelism in Deep Learning", for 8-bit gradients
on the wire; the linear code with a scale for each block is that of Dettmers et al. 2022, "8-bit
Optimizers via Block-wise Quantization", section 2, with a smaller block.
"""

import torch
from torch import Tensor

from firecaffe.gradients.compressors.codec import ROW, RowCodec

LARGEST = 127
SCALE_BYTES = 4


def encode(vector: Tensor) -> Tensor:
    """Encodes float32 (rows · ROW,) as uint8 (rows, ROW + 4): the codes, then the scale."""
    rows = vector.view(-1, ROW)
    scale = rows.abs().amax(dim=1, keepdim=True) / LARGEST
    scale *= scale >= torch.finfo(torch.float32).tiny  # NaN · 0 is NaN still
    steps = rows / torch.where(scale > 0, scale, torch.inf)
    # What a NaN would be as a whole number is undefined; the scale tells of it.
    codes = steps.nan_to_num_(nan=0.0).round_().to(torch.int8)
    scale_bytes = scale.view(-1).view(torch.uint8).view(-1, SCALE_BYTES)
    return torch.cat([codes.view(torch.uint8), scale_bytes], dim=1)


def decode(encoded: Tensor) -> Tensor:
    """Decodes uint8 (rows, ROW + 4) to float32 (rows · ROW,)."""
    scale = encoded[:, ROW:].clone().view(torch.float32)
    codes = encoded[:, :ROW].view(torch.int8)
    return (codes.to(torch.float32) * scale).view(-1)


INT8 = RowCodec(encode, decode, ROW + SCALE_BYTES, remembers=True)
