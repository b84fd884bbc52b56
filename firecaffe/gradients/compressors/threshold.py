"""The codec threshold: an element is sent once it has added up to tau; the rest waits.

An element waits in error feedback's memory until its magnitude reaches tau; then it sends tau, with
its sign, as many times as it holds tau. A payload is tau, a float32, and for each tau sent 32 bits:
the index in 31, the sign in one. So its length depends on the gradient. A tensor with an infinity
or a NaN has a tau that is not finite, and decodes to NaN.

Differs from the source: there tau is tuned for each network, and an element sends one tau a step,
which delays large gradients. Here tau is the larger of two:

    8 × the root mean square of the tensor's gradient: about one element in 64 is sent in a step
        if gradients are noise, one in 30 if they point the same way each step;
    the root mean square of the tensor with its memory: a tensor of n elements then holds at most
        n tau, and no payload is longer than the tensor, even if gradients shrink or vanish.

A multiple above √3 of the latter alone would not do: once the memory fills the range up to tau
evenly, no element is that far above the mean, tau grows with the memory and nothing is sent.

Source: Strom 2015, "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing",
Interspeech.
"""

from math import sqrt

import torch
from torch import Tensor

from firecaffe.gradients.compressors.codec import TensorCodec

RMS_MULTIPLE = 8.0
TAU_BYTES = 4
ENTRY_BYTES = 4
INDEX_MASK = 0x7FFFFFFF


def encode(x: Tensor, memory: Tensor) -> Tensor:
    tau = choose_tau(x, memory)
    magnitudes = x.abs()
    indices = (magnitudes >= tau).nonzero().view(-1)
    # Infinity over infinity is NaN; then tau alone carries the information.
    times = (magnitudes[indices] / tau).nan_to_num(nan=0.0).long()
    codes = indices.int() | (x[indices] < 0).int() << 31
    entries = codes.repeat_interleave(times)
    return torch.cat([tau.view(1).view(torch.uint8), entries.view(torch.uint8)])


def choose_tau(x: Tensor, memory: Tensor) -> Tensor:
    """Choose tau: float32 (), above 0; not finite if an element is not."""
    tau = torch.maximum(RMS_MULTIPLE * root_mean_square(x - memory), root_mean_square(x))
    # With tau 0, a tensor of zeros would send all of them.
    return tau.float().clamp(min=torch.finfo(torch.float32).tiny)


def root_mean_square(x: Tensor) -> Tensor:
    """Return the root mean square in float64 (), where squares neither overflow nor vanish."""
    norm: Tensor = torch.linalg.vector_norm(x, dtype=torch.float64)
    return norm / sqrt(max(1, x.numel()))


def decode(payload: Tensor, num_elements: int) -> Tensor:
    tau = payload[:TAU_BYTES].clone().view(torch.float32)
    entries = payload[TAU_BYTES:].clone().view(torch.int32)
    times = torch.zeros(num_elements, device=payload.device)
    signs = torch.where(entries < 0, -1.0, 1.0)
    times.index_add_(0, (entries & INDEX_MASK).long(), signs)
    return times * tau


THRESHOLD = TensorCodec(encode, decode, share=None)
