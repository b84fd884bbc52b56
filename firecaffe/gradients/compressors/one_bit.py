"""The codec one_bit: the sign of every element, and for each sign the mean of its elements.

The means have the least squared error. Error feedback, which this codec needs, corrects the rest. A
payload is two float32 values and one bit for each element. A tensor with an infinity or a NaN
decodes to values of which at least one is not finite; what was not finite never becomes finite.

Differs from the source: one pair of values for each parameter tensor, not for each column of a
matrix, because convolutions have no such columns.

Source: Seide, Fu, Droppo, Li, Yu 2014, "1-Bit Stochastic Gradient Descent and its Application to
Data-Parallel Distributed Training of Speech DNNs", Interspeech.
"""

from functools import cache

import torch
from torch import Tensor

from firecaffe.gradients.compressors.codec import TensorCodec

VALUE_BYTES = 8
GATHER_BITS = 0x0102040810204080
"""Packs eight bytes b0 … b7, each 0 or 1: the top byte of the product is the sum of b_i · 2^i."""


def encode(x: Tensor, _: Tensor) -> Tensor:
    non_negative = x >= 0
    num_upper = non_negative.count_nonzero()
    # Unlike a choice by sign, clamp keeps a NaN in both means.
    upper = x.clamp(min=0).sum() / num_upper.clamp(min=1)
    lower = x.clamp(max=0).sum() / (x.numel() - num_upper).clamp(min=1)
    return torch.cat([torch.stack([lower, upper]).view(torch.uint8), pack_bits(non_negative)])


def decode(payload: Tensor, num_elements: int) -> Tensor:
    lower, upper = payload[:VALUE_BYTES].clone().view(torch.float32)
    # Eight elements at a time: row b of the table is what byte b decodes to.
    table = torch.where(bits_of_bytes(payload.device), upper, lower)
    return table.index_select(0, payload[VALUE_BYTES:].int()).view(-1)[:num_elements]


def pack_bits(bits: Tensor) -> Tensor:
    bytes_of_eight = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).view(torch.int64)
    return (bytes_of_eight * GATHER_BITS >> 56).to(torch.uint8)


@cache
def bits_of_bytes(device: torch.device) -> Tensor:
    return (torch.arange(256).view(-1, 1) >> torch.arange(8) & 1).bool().to(device)


ONE_BIT = TensorCodec(encode, decode, share=1 / 32)
