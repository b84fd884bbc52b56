"""The codecs float16 and bfloat16, which round each number to 16 bits, as a cast does.

float16 keeps 11 significant bits of magnitudes from 6e-8 to 65504; a larger gradient becomes
infinite. bfloat16 keeps 8 bits and float32's range. There is no memory: errors are at most one part
in 2048 (bfloat16: 256) in either direction. PyTorch's DDP hooks keep no memory either.

Source: IEEE 754-2019 binary16 and, for bfloat16, the upper half of binary32; round to nearest even.
"""

import torch
from torch import Tensor

from firecaffe.gradients.compressors.codec import ROW, RowCodec


def make_cast(dtype: torch.dtype) -> RowCodec:
    row_bytes = ROW * dtype.itemsize

    def encode(vector: Tensor) -> Tensor:
        return vector.to(dtype).view(torch.uint8).view(-1, row_bytes)

    def decode(encoded: Tensor) -> Tensor:
        return encoded.view(dtype).view(-1).to(torch.float32)

    return RowCodec(encode, decode, row_bytes, remembers=False)


FLOAT16 = make_cast(torch.float16)
BFLOAT16 = make_cast(torch.bfloat16)
