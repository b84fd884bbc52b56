"""one_bit: the sign of every element, and for each sign the mean of those that have it.

Of all pairs of values that could stand for the two signs the means make the squared error least.
An element that is often sent too large or too small is put right by error feedback, which this
codec cannot do without. A payload is two float32 values and one bit for each element.

A tensor with an infinity or a NaN decodes to values of which at least one is not finite, and an
element that was not finite never decodes to a finite one.

Differs from the source: one pair of values for each parameter tensor, where the source has one
for each column of a weight matrix, which convolutions do not have.

Source: Seide, Fu, Droppo, Li, Yu 2014, "1-Bit Stochastic Gradient Descent and its Application to
Data-Parallel Distributed Training of Speech DNNs", Interspeech.
"""

from functools import cache

import torch
from torch import Tensor

from firecaffe.gradients.compressors.codec import TensorCodec

VALUE_BYTES = 8
GATHER_BITS = 0x0102040810204080
"""The factor that packs eight bytes b0 … b7, each 0 or 1: the top byte is then the sum of b_i ·
2^i."""


def encode(x: Tensor, _: Tensor) -> Tensor:
    """Encodes float32 (n,) as uint8 (8 + ceil(n / 8),): two values, then bits, lowest first."""
    non_negative = x >= 0
    num_upper = non_negative.count_nonzero()
    # clamp, unlike a choice by sign, leaves a NaN a NaN in both means.
    upper = x.clamp(min=0).sum() / num_upper.clamp(min=1)
    lower = x.clamp(max=0).sum() / (x.numel() - num_upper).clamp(min=1)
    return torch.cat([torch.stack([lower, upper]).view(torch.uint8), pack_bits(non_negative)])


def decode(payload: Tensor, num_elements: int) -> Tensor:
    """Decodes to the lower or the upper value for each element: float32 (num_elements,)."""
    lower, upper = payload[:VALUE_BYTES].clone().view(torch.float32)
    # Eight elements at a time: row b of the table is what byte b decodes to.
    table = torch.where(bits_of_bytes(payload.device), upper, lower)
    return table.index_select(0, payload[VALUE_BYTES:].int()).view(-1)[:num_elements]


def pack_bits(bits: Tensor) -> Tensor:
    """Packs bool (n,) into uint8 (ceil(n / 8),); bits that fill up the last byte are 0."""
    bytes_of_eight = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).view(torch.int64)
    return (bytes_of_eight * GATHER_BITS >> 56).to(torch.uint8)


@cache
def bits_of_bytes(device: torch.device) -> Tensor:
    """A table, bool (256, 8), of the bits of each byte, lowest first."""
    return (torch.arange(256).view(-1, 1) >> torch.arange(8) & 1).bool().to(device)


ONE_BIT = TensorCodec(encode, decode)
