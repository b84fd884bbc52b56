"""The codec top_k: sends the n / 64 elements of largest magnitude exactly; the others wait.

Of equal magnitudes the lower indices are sent, so that the choice depends on the tensor alone.
Infinities and NaN count as larger than any number. The bits of a float32 without its sign, read as
an integer, are in the order of magnitudes, so counting 11, 11 and 9 bits finds the k-th largest.

Differs from the source: a fixed share of each tensor, not of all parameters together, which would
make tensors depend on one another; and no correction of momentum.

Source: Aji and Heafield 2017, "Sparse Communication for Distributed Gradient Descent", EMNLP; Lin,
Han, Mao, Wang, Dally 2018, "Deep Gradient Compression", ICLR.
"""

import torch
from torch import Tensor

from firecaffe.gradients.compressors.codec import TensorCodec

SHARE = 64
ENTRY_BYTES = 8
MAGNITUDE_MASK = 0x7FFFFFFF
DIGITS = ((20, 11), (9, 11), (0, 9))
"""Shift and width in bits of each round, from the top."""


def num_sent(num_elements: int) -> int:
    return min(num_elements, max(1, num_elements // SHARE))


def encode(x: Tensor, _: Tensor) -> Tensor:
    """Encode float32 (n,) as uint8 (8 · num_sent(n),): the indices, ascending, then the values."""
    indices = largest(x, num_sent(x.numel()))
    return torch.cat([indices.int().view(torch.uint8), x[indices].view(torch.uint8)])


def decode(payload: Tensor, num_elements: int) -> Tensor:
    indices, values = payload.clone().view(torch.int32).chunk(2)
    decoded = torch.zeros(num_elements, device=payload.device)
    decoded[indices.long()] = values.view(torch.float32)
    return decoded


def largest(x: Tensor, count: int) -> Tensor:
    """Return indices of the `count` largest magnitudes, ascending; ties go to lower indices."""
    if count == 0:
        return torch.zeros(0, dtype=torch.int64, device=x.device)
    keys = x.view(torch.int32) & MAGNITUDE_MASK
    least = largest_at(keys, count)
    indices = (keys >= least).nonzero().view(-1)
    surplus = indices.numel() - count
    if surplus:
        is_sent = torch.ones_like(indices, dtype=torch.bool)
        ties = (keys[indices] == least).nonzero().view(-1)
        is_sent[ties[-surplus:]] = False
        indices = indices[is_sent]
    return indices


def largest_at(keys: Tensor, place: int) -> Tensor:
    for shift, width in DIGITS:
        digits = keys >> shift & (1 << width) - 1
        from_top = torch.bincount(digits, minlength=1 << width).flip(0).cumsum(0)
        higher = int((from_top < place).sum())
        if higher:
            place -= int(from_top[higher - 1])
        keys = keys[digits == (1 << width) - 1 - higher]
    return keys[0]


TOP_K = TensorCodec(encode, decode, share=ENTRY_BYTES / SHARE / torch.float32.itemsize)
